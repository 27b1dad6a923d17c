#!/usr/bin/env bash
# One run of train.py for each line of a file, as an array of jobs, submitted from the repository's folder:
#   sbatch --array=0-107%4 --ntasks=14 slurm/array.sh FILE
# Two minutes before the time limit a run saves a checkpoint, goes back into the queue and goes on. Account, partition and
# GPUs are the site's: options of sbatch before the script's name, or SBATCH_* variables. See step.sh for data on nodes' disks.
#SBATCH --job-name=spardl
#SBATCH --output=slurm-%A_%a.txt
#SBATCH --open-mode=append
#SBATCH --time=60
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$1")
if [ -z "$line" ]; then
    echo "error: $1 has no line $((SLURM_ARRAY_TASK_ID + 1)); submit with --array=0-$(($(wc -l < "$1") - 1))" >&2
    exit 2
fi
if [ ! -f slurm/step.sh ]; then
    echo "error: there is no slurm/step.sh in $PWD; submit from the folder of train.py" >&2
    exit 2
fi
# The file's words are quoted for a shell.
eval "exec bash slurm/step.sh $line"
