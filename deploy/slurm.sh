#!/usr/bin/env bash
# Train under Slurm: one shard on each node, one worker a GPU. Start it with `sbatch slurm.sh`.
#SBATCH --job-name=shoestring
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

# A folder that all nodes reach.
shared=${SHARED:-$SLURM_SUBMIT_DIR}

# Keys of this job alone, readable by you alone.
export SHOESTRING_KEYS=$shared/keys-$SLURM_JOB_ID
rm -rf "$SHOESTRING_KEYS"
shoestring keys new shard --dir "$SHOESTRING_KEYS" >/dev/null
for ((worker = 0; worker < SLURM_NTASKS; worker++)); do
    shoestring keys new "worker-$worker" --dir "$SHOESTRING_KEYS" >/dev/null
done
trap 'rm -rf "$SHOESTRING_KEYS"' EXIT

# A job that is put back into the queue goes on from its newest checkpoint.
export SHOESTRING_CHECKPOINT=$shared/checkpoints
export SHOESTRING_EVERY=500
export SHOESTRING_FOLDER=$shared/shoestring-runs/$SLURM_JOB_ID

srun --kill-on-bad-exit=1 python "${1:-train.py}" "${@:2}"
