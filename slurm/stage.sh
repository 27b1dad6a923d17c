# Copies data to the disk of every node of this job, where it is not there yet. For a batch script:
#   . slurm/stage.sh FROM TO
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    bash "$(dirname "${BASH_SOURCE[0]}")/copy.sh" "$1" "$2" || exit 1
export SPARDL_DATA=$2
