#!/usr/bin/env bash
# Make the run that docs/watching.md shows, and its report: ./scripts/report_example.sh FOLDER
#
# A debug run on four processes that is killed, resumed, stopped by SIGTERM, damaged, resumed with another learning rate,
# killed again, and rolled back. FOLDER must not exist. About three minutes on two cores; PYTHON as in scripts/env.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${1:?expected a folder for the run} python=${PYTHON:-python}
[[ ! -e $run ]] || { echo "$run exists already" >&2; exit 2; }
mkdir -p "$run"
options=(--training.steps 240 --training.batch_size 2 --training.seq_len 128 --metrics.log_freq 1)
options+=(--checkpoint.interval 20 --checkpoint.keep_latest_k 4 --checkpoint.async_mode async)
options+=(--job.dump_folder "$run" --metrics.enable_tensorboard=False)

start() { # in the background; its process is torchrun, and the ranks are its children
    NGPU=4 PYTHON=$python ./run_train.sh "${options[@]}" "$@" >>"$run.log" 2>&1 &
    job=$!
    begun=$(date +%s)
}
wait_for_step() { # of this start: until it writes, the file has the lines of the last one
    local step=0
    until [[ $step -ge $1 && $(stat -c %Y "$run/metrics.jsonl") -gt $((begun + 4)) ]]; do
        kill -0 "$job" 2>/dev/null || { echo "the job ended before step $1, see $run.log" >&2; exit 1; }
        sleep 0.1
        step=$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | sed -E 's/.*"step": ([0-9]+).*/\1/' || true)
        step=${step:-0}
    done
}
end() { # with a signal to the ranks too, or only to torchrun, which passes it on
    kill "$@"
    wait "$job" || true
}
checkpoints() { find "$run/checkpoint" -regex '.*/step-[0-9]+' | sort -V; }

start
wait_for_step 76
end -KILL $(pgrep -P "$job") "$job"
start
wait_for_step 131
end -TERM "$job"
printf 'x' | dd of="$(checkpoints | tail -n 1)/__2_0.distcp" bs=1 seek=5000 conv=notrunc status=none
options+=(--optimizer.lr 6e-4 --checkpoint.interval 15)
start
wait_for_step 183
end -KILL $(pgrep -P "$job") "$job"
start --checkpoint.load_step "$(checkpoints | tail -n 2 | head -n 1 | sed 's/.*step-//')"
wait "$job"
"$python" -m torchtitan_lite.cli report "$run" "$run.html"
"$python" scripts/draw_report.py "$run.html"
