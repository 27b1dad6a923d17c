#!/usr/bin/env bash
# Ends a batch script, when its workers have: a run that was stopped goes back into the queue, unless its job was
# cancelled.
#   after.sh CODE TIMES        the workers' exit code; how often a job may go back
set -uo pipefail
code=$1 times=$2 restarts=${SLURM_RESTART_COUNT:-0}
# One task of an array has the array's own number, which means all its tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
case $code in
    75) ;;      # stopped as asked, and saved
    138|143) ;; # killed by SIGUSR1 or SIGTERM before Python could answer
    *) exit "$code" ;;
esac
if [ "$restarts" -ge "$times" ]; then
    echo "error: stopped, and not put into the queue again after $restarts times; submit it again to go on" >&2
    exit "$code"
fi
state=$(timeout 60 scontrol --oneliner show job "$job") || state=
case $state in
    *JobState=CANCELLED*) exit "$code" ;;
esac
if timeout 60 scontrol requeue "$job"; then
    echo "job $job was stopped and is in the queue again (requeue $((restarts + 1)) of $times)"
else
    echo "error: stopped, and scontrol could not put the job into the queue again; submit it again to go on" >&2
fi
exit "$code"
