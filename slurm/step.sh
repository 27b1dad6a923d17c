#!/usr/bin/env bash
# What every batch file of this folder does: data to the nodes, then the workers, then perhaps back into the queue.
#   step.sh COMMAND ...
# STAGE_FROM and STAGE_TO, if set: data that nodes copy, and where to. REQUEUES: how often a job may go back (10).
set -uo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ -n "${STAGE_FROM:-}" ]; then
    . "$here/stage.sh" "$STAGE_FROM" "${STAGE_TO:?where to is missing: set STAGE_TO}"
fi
# When one worker has failed, the others end by themselves, with a reason; so do those that were asked to stop. As
# variables, not as options: a site's own values of them would win over nothing.
export SLURM_KILL_BAD_EXIT=0 SLURM_WAIT=60 SLURM_OPEN_MODE=append
# What the workers of this run know, and others who reach their store do not.
SPARDL_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export SPARDL_SECRET
srun "$@"
exec bash "$here/after.sh" $? "${REQUEUES:-10}"
