#!/usr/bin/env bash
# One run of train.py for each line of a file, as an array of jobs:
#   sbatch --array=0-107%4 --ntasks=14 slurm/array.sh FILE
# Account, partition, time limit and GPUs are the site's: options of sbatch before the script's name, or SBATCH_* variables.
#SBATCH --job-name=spardl
#SBATCH --output=slurm-%A_%a.txt
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$1")
if [ -z "$line" ]; then
    echo "error: $1 has no line $((SLURM_ARRAY_TASK_ID + 1)); submit with --array=0-$(($(wc -l < "$1") - 1))" >&2
    exit 2
fi
# The file's words are quoted for a shell.
eval "exec srun $line"
