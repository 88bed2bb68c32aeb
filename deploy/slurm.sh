#!/usr/bin/env bash
#SBATCH --job-name=isotrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
# Online training on the nodes of one Slurm job: a Ray cluster of its own, then `isotrain train`.
#
#   sbatch --nodes=2 --gpus-per-node=8 deploy/slurm.sh recipe.yaml device.ranks=16
#
# Slurm's time limit and `scancel --signal=TERM --batch` end it with a checkpoint; submit it again to resume. isotrain
# must be on PATH on every node, and the recipe's `output` and $HOME on a file system that all nodes share.
set -euo pipefail

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# One Ray per node with all of its processors, beside the steps that run already. Only for subshells: `exec` makes the
# process that `finish` ends srun itself.
on() {
    exec srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --nodelist="$1" "${@:2}"
}
address=$(on "${nodes[0]}" hostname --all-ip-addresses | tr ' ' '\n' | grep --max-count=1 '^[0-9.]*$')

# Without a token, everyone who reaches the nodes could run code on them.
token=$(mktemp "${HOME}/.isotrain-ray-XXXXXXXX")
head --bytes=32 /dev/urandom | od --address-radix=n --format=x1 | tr --delete ' \n' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0
# isotrain itself assigns devices to its workers.
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1 RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1

rays=()
training=
# shellcheck disable=SC2329  # by the trap below
finish() {
    kill "${rays[@]}" 2> /dev/null || true
    wait "${rays[@]}" 2> /dev/null || true
    rm --force "$token"
}
trap finish EXIT
trap 'kill -TERM $training 2> /dev/null || true' TERM

for node in "${nodes[@]}"; do
    if [ "$node" = "${nodes[0]}" ]; then
        on "$node" ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
        rays+=($!)
        tries=0
        until (exec 3<> "/dev/tcp/$address/$port") 2> /dev/null; do
            tries=$((tries + 1))
            if [ "$tries" -ge 120 ] || ! kill -0 "${rays[0]}" 2> /dev/null; then
                echo "Ray did not start on $node: nothing listens on $address:$port" >&2
                exit 1
            fi
            sleep 1
        done
    else
        on "$node" ray start --address="$address:$port" --block &
        rays+=($!)
    fi
done

# This script runs on the first node. isotrain waits for the devices of the others (`cluster.start_timeout`).
isotrain train "$@" cluster.address="$address:$port" &
training=$!
code=0
wait "$training" || code=$?
# A signal ends the first `wait` before isotrain has saved its checkpoint.
if kill -0 "$training" 2> /dev/null; then
    code=0
    wait "$training" || code=$?
fi
exit "$code"
