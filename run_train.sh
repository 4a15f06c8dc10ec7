#!/usr/bin/env bash
# Set up if needed, then run the main job: ./run_train.sh [--section.key value ...]
#
#   NGPU              processes; default: the GPUs of this machine, else 2
#   CONFIG_FILE       default llama_debug.toml; looked up as given, then in train_configs/
#   LOG_RANK          ranks whose output is shown, such as 0,1; default 0
#   SHUTDOWN_TIMEOUT  seconds for the workers to save and exit after a signal; default 600
#   PYTHON            see scripts/env.sh
#
# Outputs are relative to the working directory. Exit codes: torchrun's; 2: wrong usage; 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

CONFIG_IS_FINE=10 # with any other exit code of the check the script ends too: 0 after --help, 2 for wrong usage
CHECK="import sys
from torchtitan_lite.config.manager import parse_config_or_exit
parse_config_or_exit(sys.argv[1:])
sys.exit($CONFIG_IS_FINE)"
LAUNCHER_OPTIONS='import torch, torch.distributed.run
print(torch.cuda.device_count() or 2)
torch.distributed.run.get_args_parser().print_help()'

if [[ ! ${NGPU:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU: expected a number of processes, found '$NGPU'. Set it to 1 or more." >&2
    exit 2
fi
set_up safetensors # which checkpoint.last_save_in_hf needs
arguments=(--job.config_file="${CONFIG_FILE:-llama_debug.toml}" "$@")

code=0
"$PYTHON" -c "$CHECK" "${arguments[@]}" || code=$?
[[ $code == "$CONFIG_IS_FINE" ]] || exit "$code"

options="$("$PYTHON" -c "$LAUNCHER_OPTIONS")"
launch=(--standalone --local-addr=localhost --nproc-per-node="${NGPU:-${options%%$'\n'*}}")
launch+=(--local-ranks-filter="${LOG_RANK:-0}")
if [[ $options == *--signals-to-handle* ]]; then
    launch+=("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
if [[ $options == *--shutdown-timeout* ]]; then
    launch+=(--shutdown-timeout="${SHUTDOWN_TIMEOUT:-600}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun's default; setting it avoids its warning
exec "$PYTHON" -m torch.distributed.run "${launch[@]}" "$ROOT/train.py" "${arguments[@]}"
