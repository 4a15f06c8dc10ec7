#!/usr/bin/env bash
#SBATCH --job-name=torchtitan-lite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Train on several nodes, and queue the job again after each preemption:
#
#   sbatch scripts/slurm_train.sh [--section.key value ...]
#
#   CONFIG_FILE  default llama_debug.toml; looked up as given, then in train_configs/
#   NGPU         processes per node; default: the GPUs that Slurm allocated on a node, else 1
#   REPO         the clone, visible from every node; default: the folder that the job is submitted from
#   PYTHON       default: .venv/bin/python in REPO
#   SPARE_NODES  how many of the nodes wait to take the place of lost ones; default 0. Submit with --no-kill then
#
# Options of sbatch on the command line override the #SBATCH lines; docs/clusters.md gives the reasons for these.
# Exit codes: 0 finished, or queued again; 2 wrong usage; 3 set-up impossible; else the exit code of srun.

set -euo pipefail

GRACE_SECONDS=240   # time for the ranks to save and exit, unless --checkpoint.preemption_grace_seconds is given
MARGIN_SECONDS=30   # torchrun waits longer by this before it kills, so that a rank that cannot leave can log why
LOOK_SECONDS=120    # for each node to run a command; after that one of them is lost
SIGNALS=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
CONFIG_IS_FINE=10   # with any other exit code of the check the script ends too: 0 after --help, 2 for wrong usage
# Does not import torch, which is slow on a shared file system: the options of torchrun are found in its source.
CHECK="import importlib.util, pathlib, sys
from torchtitan_lite.config.manager import parse_config_or_exit
config = parse_config_or_exit(sys.argv[1:])
launcher = pathlib.Path(importlib.util.find_spec('torch').origin).with_name('distributed') / 'run.py'
options = [o for o in ('--signals-to-handle', '--shutdown-timeout') if o in launcher.read_text()]
only_loads = config.checkpoint.enable_checkpoint and config.checkpoint.load_only
print(config.checkpoint.preemption_grace_seconds, int(only_loads), ' '.join(options), config.job.dump_folder, sep='\n')
sys.exit($CONFIG_IS_FINE)"

# With spare nodes, what each node runs: the store's HOST and PORT, then torchrun. If the node of this script is lost,
# Slurm leaves a job with --no-kill running without it; then the store does not answer, and another node queues it again.
# srun signals the complete process group, so this shell too.
# shellcheck disable=SC2016 # the shells of the nodes expand it
ON_NODE='trap : USR1
"${@:3}" && exit
code=$?
(: <"/dev/tcp/$1/$2") 2>/dev/null || scontrol requeue "$SLURM_JOB_ID"
exit "$code"'

num_signals=0 # signals received that ask the job to leave
step=""       # process id of srun
store=""      # process id of the store in which the nodes meet; with spare nodes only

main() {
    local code=0 events before end why=preempted
    # First of all: without a trap the signal would end this script, and the job would not be queued again.
    trap on_signal USR1 TERM
    check_set_up
    read_config "$@"
    events="$dump_folder/events.jsonl"
    before="$(number_of_lines "$events")"
    if ((num_signals == 0)); then
        run_step "$@" || code=$?
        end="$(end_since "$before" "$events")"
        case "$end" in
        preempted) ;;
        finished) end_with 0 ;; # also if a node was lost
        *)
            if a_node_is_lost; then
                why="a node is lost"
            elif ! ((only_loads && num_signals && code)); then
                end_with "$code"
            fi
            ;;
        esac
    fi
    queue_again "$why"
}

on_signal() {
    num_signals=$((num_signals + 1))
    [[ -z $step ]] || signal_step
}

# srun forwards SIGUSR1 to the task of every node. A SIGTERM would end srun itself, which then kills the tasks.
signal_step() {
    kill -USR1 "$step" 2>/dev/null || true
}

check_set_up() {
    [[ -n ${SLURM_JOB_ID:-} ]] || give_up "this is not a Slurm job: submit it with sbatch scripts/slurm_train.sh."
    # Slurm runs a copy of this script from its spool folder, so the path of the script is not in the clone.
    REPO="${REPO:-$SLURM_SUBMIT_DIR}"
    PYTHON="${PYTHON:-$REPO/.venv/bin/python}"
    [[ -f $REPO/train.py ]] || give_up "$REPO has no train.py: submit from the clone, or name it in REPO."
    [[ -x $(command -v "$PYTHON") ]] || give_up "$PYTHON is not executable: run ./run_train.sh --help in $REPO, or set PYTHON."
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
    [[ ${SPARE_NODES:-0} =~ ^[0-9]+$ ]] || wrong_usage "SPARE_NODES: expected a number of nodes, found '$SPARE_NODES'."
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#nodes[@]} > 0)) || give_up "scontrol found no node in SLURM_JOB_NODELIST, which is '$SLURM_JOB_NODELIST'."
    num_nodes="$((${#nodes[@]} - ${SPARE_NODES:-0}))"
    ((num_nodes > 0)) || wrong_usage "SPARE_NODES is $SPARE_NODES: none of the ${#nodes[@]} nodes is left to train on."
}

read_config() {
    local code=0 answers
    arguments=(--job.config_file="${CONFIG_FILE:-llama_debug.toml}")
    arguments+=(--checkpoint.preemption_grace_seconds="$GRACE_SECONDS" "$@")
    answers="$("$PYTHON" -c "$CHECK" "${arguments[@]}")" || code=$?
    if ((code != CONFIG_IS_FINE)); then
        printf '%s\n' "$answers"
        exit "$code"
    fi
    { read -r grace_seconds && read -r only_loads && read -r options && IFS= read -r dump_folder; } <<<"$answers"
}

run_step() {
    local code signals_before port="$((20000 + SLURM_JOB_ID % 20000))"
    local srun=(--ntasks-per-node=1 --kill-on-bad-exit=0)
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        srun+=(--cpus-per-task="$SLURM_CPUS_PER_TASK") # srun no longer inherits it from sbatch since Slurm 22.05
    fi
    local launch=() run=("$PYTHON" -m torch.distributed.run)
    launch+=(--nnodes="$num_nodes" --nproc-per-node="${NGPU:-${SLURM_GPUS_ON_NODE:-1}}")
    launch+=(--rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port")
    launch+=(--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")
    if ((num_nodes < ${#nodes[@]})); then
        # Of a spare node, torchrun waits without end for a place, and ends when the others have finished.
        launch+=(--max-restarts="$((${#nodes[@]} - num_nodes))" --rdzv-conf=is_host=0)
        srun+=(--no-kill --wait=0)
        run=(bash -c "$ON_NODE" torchrun "${nodes[0]}" "$port" "${run[@]}")
        serve_store "$port"
    else
        srun+=(--wait="$MARGIN_SECONDS")
    fi
    if [[ $options == *--signals-to-handle* ]]; then
        launch+=(--signals-to-handle="$SIGNALS")
    else
        say "this torchrun cannot forward SIGUSR1 to its workers: a preempted job will not save. Update torch."
    fi
    if [[ $options == *--shutdown-timeout* ]]; then
        launch+=(--shutdown-timeout="$((grace_seconds + MARGIN_SECONDS))")
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun's default; setting it avoids its warning
    srun "${srun[@]}" "${run[@]}" "${launch[@]}" "$REPO/train.py" "${arguments[@]}" &
    step=$!
    ((num_signals == 0)) || signal_step
    while true; do
        signals_before=$num_signals code=0
        wait "$step" || code=$?
        # A signal interrupts the wait, which then returns the code of the signal: wait again for that of the step.
        ((signals_before != num_signals)) || break
    done
    [[ -z $store ]] || kill "$store" 2>/dev/null || true
    return "$code"
}

# On this node, where the script runs: if it is lost the job has ended anyway, and Slurm queues it again.
serve_store() {
    # Else a node that comes later is not heard: the others publish the address of a store that they share once.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    "$PYTHON" "$REPO/scripts/rendezvous_store.py" 0.0.0.0 "$1" &
    store=$!
}

number_of_lines() {
    if [[ -f $1 ]]; then wc -l <"$1"; else echo 0; fi
}

# torchrun turns every exit code of a worker except 0 into 1, so read how the run ended in its own events. A run that
# only loads writes none: a signal and a code that is not 0 have to do.
end_since() {
    [[ ! -f $2 ]] || tail -n "+$(($1 + 1))" "$2" | sed -En 's/.*"event": "(preempted|finished)".*/\1/p' | tail -n 1
}

# Slurm itself notices a lost node only after minutes (SlurmdTimeout), and queues the job again if it still runs then.
a_node_is_lost() {
    ((code)) && ! timeout "$LOOK_SECONDS" srun --ntasks-per-node=1 --kill-on-bad-exit=1 true
}

end_with() {
    if (($1 == 0)); then
        say "finished."
    elif ((num_signals)); then
        say "asked to leave, but ended with $1 before it saved; not queued again. To continue, run the same sbatch."
    else
        say "failed with $1; not queued again. To continue, fix the cause and run the same sbatch."
    fi
    exit "$1"
}

queue_again() {
    say "$1; queueing job $SLURM_JOB_ID again."
    scontrol requeue "$SLURM_JOB_ID" || {
        say "the job could not be queued again. To continue, run the same sbatch."
        exit 1
    }
}

give_up() {
    say "$@"
    exit 3
}

wrong_usage() {
    say "$@"
    exit 2
}

say() {
    printf 'slurm_train: %s\n' "$*" >&2
}

main "$@"
