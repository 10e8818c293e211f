#!/bin/bash
# Training on several machines under Slurm, which goes on by itself after a time limit or a lost node:
#
#     sbatch --nodes 2 recipes/accelerate/slurm.sh --target llama3.3-70b ... --out /shared/runs/NAME
#
# Every word behind the script is a word of `specctl train-draft`; leave --gpus out. --out, the data
# and the models must lie on a disk that all nodes see. Change the lines below for your cluster.
#SBATCH --job-name=specctl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=specctl-%j.log

set -u
AGAIN=75 # specctl was stopped, its state is saved: the same command continues

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
# Without them a run on a busy cluster waits for hours on a node that is gone.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# Without it an agent that is started anew never hears from the one that stayed where to meet.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" --max-restarts 3 \
  -m specctl train-draft "$@" &
step=$!

# Five minutes before the end Slurm signals this script alone: hand it on, the state is saved.
stopped=0
trap 'stopped=1; kill -TERM "$step" 2>/dev/null' TERM
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # a trap interrupts the first wait
  wait "$step"
  code=$?
done
if [ "$code" = "$AGAIN" ] || [ "$stopped" = 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
