#!/usr/bin/env bash
# Sets up where that is needed, then runs the main job: ./run_train.sh [--section.key value ...]
#
#   NGPU              processes; default: the GPUs there are, else 2
#   CONFIG_FILE       default llama_debug.toml; looked up as given, then in train_configs/
#   LOG_RANK          ranks whose output is shown, as 0,1; default 0
#   SHUTDOWN_TIMEOUT  seconds that workers have to save after a signal; default 600
#   PYTHON            see scripts/env.sh
#
# Outputs are relative to the working directory. Exit codes: torchrun's; 2: wrong usage; 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

CONFIG_IS_FINE=10 # any other exit of the check is the last word: 0 after --help, 2 for wrong usage
CHECK="import sys
from torchtitan_lite.config.manager import parse_config_or_exit
parse_config_or_exit(sys.argv[1:])
sys.exit($CONFIG_IS_FINE)"
LAUNCHER_FACTS='import torch, torch.distributed.run
print(torch.cuda.device_count() or 2)
torch.distributed.run.get_args_parser().print_help()'

if [[ ! ${NGPU:-1} =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU: expected a number of processes, found '$NGPU'." >&2
    exit 2
fi
set_up test
arguments=(--job.config_file="${CONFIG_FILE:-llama_debug.toml}" "$@")

found=0
"$PYTHON" -c "$CHECK" "${arguments[@]}" || found=$?
[[ $found == "$CONFIG_IS_FINE" ]] || exit "$found"

facts="$("$PYTHON" -c "$LAUNCHER_FACTS")"
launch=(--standalone --local-addr=localhost --nproc-per-node="${NGPU:-${facts%%$'\n'*}}")
launch+=(--local-ranks-filter="${LOG_RANK:-0}")
if [[ $facts == *--signals-to-handle* ]]; then
    launch+=("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
fi
if [[ $facts == *--shutdown-timeout* ]]; then
    launch+=(--shutdown-timeout="${SHUTDOWN_TIMEOUT:-600}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun's own default, said here so that it need not warn
exec "$PYTHON" -m torch.distributed.run "${launch[@]}" "$ROOT/train.py" "${arguments[@]}"
