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
# One job on some nodes, queued again for as long as it is preempted: sbatch scripts/slurm_train.sh [--section.key value]
#
#   CONFIG_FILE  default llama_debug.toml; looked up as given, then in train_configs/
#   NGPU         processes a node; default: the GPUs that Slurm gave on a node, else 1
#   REPO         the clone, seen from every node; default: the folder that the job is submitted from
#   PYTHON       default: .venv/bin/python in REPO
#
# What is given to sbatch itself goes before the lines above. docs/slurm.md says why they are as they are.
# Exit codes: 0 finished, or queued again; else the step's own; 2 wrong usage; 3 set-up impossible.

set -euo pipefail

GRACE_SECONDS=240   # the ranks have so long to save and leave, unless --checkpoint.preemption_grace_seconds is given
MARGIN_SECONDS=30   # torchrun waits so much longer before it kills: a rank that cannot leave says why first
SIGNALS=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
CONFIG_IS_FINE=10   # any other exit of the check is the last word: 0 after --help, 2 for wrong usage
# torch is not imported: on a shared filesystem that takes long, and the launcher's options can be read in its source.
CHECK="import importlib.util, pathlib, sys
from torchtitan_lite.config.manager import parse_config_or_exit
config = parse_config_or_exit(sys.argv[1:])
launcher = pathlib.Path(importlib.util.find_spec('torch').origin).with_name('distributed') / 'run.py'
options = [o for o in ('--signals-to-handle', '--shutdown-timeout') if o in launcher.read_text()]
print(config.checkpoint.preemption_grace_seconds, ' '.join(options), config.job.dump_folder, sep='\n')
sys.exit($CONFIG_IS_FINE)"

asked=0 # how often the job was told to leave
step="" # process id of srun

main() {
    local code=0 events before
    # Before anything else: without a trap the signal ends this script, and nobody queues the job again.
    trap told_to_leave USR1 TERM
    check_set_up
    read_config "$@"
    events="$dump_folder/events.jsonl"
    before="$(number_of_lines "$events")"
    if ((asked == 0)); then
        run_step "$@" || code=$?
        if ! is_preempted_since "$before" "$events"; then
            end_with "$code"
        fi
    fi
    queue_again
}

told_to_leave() {
    asked=$((asked + 1))
    [[ -z $step ]] || tell_step
}

# srun hands SIGUSR1 on to the task of every node; a SIGTERM it would take for itself, and kill the tasks.
tell_step() {
    kill -USR1 "$step" 2>/dev/null || true
}

check_set_up() {
    [[ -n ${SLURM_JOB_ID:-} ]] || give_up "this is no Slurm job: submit it with sbatch scripts/slurm_train.sh."
    # Slurm runs a copy of this script from a folder of its own, so its path says nothing.
    REPO="${REPO:-$SLURM_SUBMIT_DIR}"
    PYTHON="${PYTHON:-$REPO/.venv/bin/python}"
    [[ -f $REPO/train.py ]] || give_up "$REPO has no train.py: submit from the clone, or name it in REPO."
    [[ -x $(command -v "$PYTHON") ]] || give_up "$PYTHON is no Python: run ./run_tests.sh once in $REPO, or set PYTHON."
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
}

read_config() {
    local found=0 facts
    arguments=(--job.config_file="${CONFIG_FILE:-llama_debug.toml}")
    arguments+=(--checkpoint.preemption_grace_seconds="$GRACE_SECONDS" "$@")
    facts="$("$PYTHON" -c "$CHECK" "${arguments[@]}")" || found=$?
    if ((found != CONFIG_IS_FINE)); then
        printf '%s\n' "$facts"
        exit "$found"
    fi
    { read -r grace_seconds && read -r options && IFS= read -r dump_folder; } <<<"$facts"
}

run_step() {
    local nodes code seen
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#nodes[@]} > 0)) || give_up "scontrol names no node for '$SLURM_JOB_NODELIST'."
    local srun=(--ntasks-per-node=1 --kill-on-bad-exit=0 --wait="$MARGIN_SECONDS")
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        srun+=(--cpus-per-task="$SLURM_CPUS_PER_TASK") # srun does not take it over from sbatch since Slurm 22.05
    fi
    local launch=(--nnodes="${#nodes[@]}" --nproc-per-node="${NGPU:-${SLURM_GPUS_ON_NODE:-1}}")
    launch+=(--rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 20000))")
    launch+=(--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")
    if [[ $options == *--signals-to-handle* ]]; then
        launch+=(--signals-to-handle="$SIGNALS")
    else
        say "this torchrun cannot hand SIGUSR1 on to its workers: the job will not save when it is told to leave."
    fi
    if [[ $options == *--shutdown-timeout* ]]; then
        launch+=(--shutdown-timeout="$((grace_seconds + MARGIN_SECONDS))")
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun's own default, said here so that it need not warn
    srun "${srun[@]}" "$PYTHON" -m torch.distributed.run "${launch[@]}" "$REPO/train.py" "${arguments[@]}" &
    step=$!
    ((asked == 0)) || tell_step
    while true; do
        seen=$asked code=0
        wait "$step" || code=$?
        # A trap cuts the wait short with a code of its own; asked again, it tells the step's.
        ((seen != asked)) || break
    done
    return "$code"
}

number_of_lines() {
    if [[ -f $1 ]]; then wc -l <"$1"; else echo 0; fi
}

# torchrun turns every exit code of a worker but 0 into 1, so what happened is read where the run itself says it.
is_preempted_since() {
    [[ -f $2 ]] && tail -n "+$(($1 + 1))" "$2" | grep --count '"event": "preempted"' >/dev/null
}

end_with() {
    if (($1 == 0)); then
        say "finished."
    elif ((asked)); then
        say "told to leave, but it ended with $1 before it had saved; not queued again. The same sbatch goes on."
    else
        say "failed with $1; not queued again. Once mended, the same sbatch goes on."
    fi
    exit "$1"
}

queue_again() {
    say "preempted; queueing job $SLURM_JOB_ID again."
    scontrol requeue "$SLURM_JOB_ID" || {
        say "it could not be queued again. The same sbatch goes on."
        exit 1
    }
}

give_up() {
    say "$@"
    exit 3
}

say() {
    printf 'slurm_train: %s\n' "$*" >&2
}

main "$@"
