#!/usr/bin/env bash
# One run of train.py over all tasks of a job, submitted from the repository's folder:
#   sbatch --nodes=4 --ntasks-per-node=2 slurm/run.sh compressor=spardl
# Two minutes before the time limit it saves a checkpoint, goes back into the queue and goes on. Account, partition and GPUs
# are the site's: options of sbatch before the script's name, or SBATCH_* variables. See step.sh for data on nodes' disks.
#SBATCH --job-name=spardl
#SBATCH --output=slurm-%j.txt
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
if [ ! -f slurm/step.sh ]; then
    echo "error: there is no slurm/step.sh in $PWD; submit from the folder of train.py" >&2
    exit 2
fi
exec bash slurm/step.sh python train.py "$@" resume=auto
