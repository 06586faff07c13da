#!/bin/bash
# sbatch examples/slurm.sh [options of twoaxis train]      e.g. --depth attnres --data-parallel 16 --sharding fsdp
# One torchrun per node, which starts a process per GPU; the product of the grid's sizes must be nodes x GPUs.
#SBATCH --job-name=twoaxis
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue                  # after a lost node: the same command goes on from the newest checkpoint
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300        # five minutes before the end: a step is finished and saved
#SBATCH --output=%x-%j.log
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --max-restarts 10 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    -m twoaxis train --resume --checkpoint-format sharded --checkpoint-async --checkpoint-every 500 --keep-every 10000 \
    --out "${OUT:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}" "$@" &
trap 'kill -TERM $!; wait $!' TERM # torchrun hands it on to its processes
wait $!
