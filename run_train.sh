#!/usr/bin/env bash
# Set up if needed, then run the main job: ./run_train.sh [--section.key value ...]
#
#   NGPU              processes; default: the GPUs of this machine, else 2
#   NNODES            nodes, 2 or 1:4 for any number from 1 to 4; run this command on each; default 1
#   RDZV              HOST:PORT of the store that scripts/rendezvous_store.py serves; needed for more than one node
#   RDZV_ID           the job's name in that store: jobs one after another need names of their own; default job
#   CONFIG_FILE       default llama_debug.toml; looked up as given, then in train_configs/
#   LOG_RANK          ranks whose output is shown, such as 0,1; default 0
#   MAX_RESTARTS      how often torchrun starts all workers again after one died; default 0
#   SHUTDOWN_TIMEOUT  seconds for the workers to save and exit after a signal; default 600
#   PYTHON            see scripts/env.sh
#
# Outputs are relative to the working directory. Exit codes: torchrun's; 2: wrong usage; 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

if [[ ! ${NGPU:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU: expected a number of processes, found '$NGPU'. Set it to 1 or more." >&2
    exit 2
fi
if [[ ! ${MAX_RESTARTS:-0} =~ ^[0-9]+$ ]]; then
    echo "MAX_RESTARTS: expected a number, found '$MAX_RESTARTS'. Set it to 0 or more." >&2
    exit 2
fi
if [[ ! ${NNODES:-1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]]; then
    echo "NNODES: expected a number of nodes, or two as in 1:4, found '$NNODES'. Set it to 1 or more." >&2
    exit 2
fi
if [[ -n ${NNODES:-} ]] && ((${NNODES%:*} > ${NNODES#*:})); then
    echo "NNODES: expected the smaller number first, found '$NNODES'. Set it to ${NNODES#*:}:${NNODES%:*}." >&2
    exit 2
fi
if [[ ! ${RDZV:-host:1} =~ ^[^:]+:[0-9]+$ ]]; then
    echo "RDZV: expected HOST:PORT, found '$RDZV'. Set it to the place where scripts/rendezvous_store.py runs." >&2
    exit 2
fi
if [[ ${NNODES:-1} != 1 && -z ${RDZV:-} ]]; then
    echo "NNODES is $NNODES, and RDZV is not set. Set it to HOST:PORT, where scripts/rendezvous_store.py runs." >&2
    exit 2
fi
if [[ ! ${LOG_RANK:-0} =~ ^[0-9]+(,\ *[0-9]+)*$ ]]; then
    echo "LOG_RANK: expected ranks separated by commas, found '$LOG_RANK'. Set it as in 0,1." >&2
    exit 2
fi
if [[ ! ${SHUTDOWN_TIMEOUT:-0} =~ ^[0-9]+$ ]]; then
    echo "SHUTDOWN_TIMEOUT: expected seconds, found '$SHUTDOWN_TIMEOUT'. Set it to 0 or more." >&2
    exit 2
fi
set_up safetensors # which checkpoint.last_save_in_hf needs
arguments=(--job.config_file="${CONFIG_FILE:-llama_debug.toml}" "$@")

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun's default; setting it avoids its warning
exec "$PYTHON" "$ROOT/scripts/launch.py" "${arguments[@]}"
