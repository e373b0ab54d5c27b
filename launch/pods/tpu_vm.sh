#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU slice, started again when a host or a process dies:
#
#     TPU=my-v5e-32 ZONE=us-west4-a launch/pods/tpu_vm.sh launch.grpo --mesh=dp4,tp8 --run-dir=/shared/runs/a ...
#
# On every host the project, with its .venv, must lie in FOLDER, and --run-dir and the
# model on a file system that all hosts share, such as Filestore. The hosts find each
# other. Ctrl-C here ends this script; `pkill -TERM -f launch.` on a host saves the run.
set -u

: "${TPU:?the name of the TPU slice}" "${ZONE:?the zone of the TPU slice}"
attempts=${ATTEMPTS:-10}
folder=${FOLDER:-jaxrl_post}
# gcloud does not pass on which status a host's command had. What fails sooner than this
# has a reason that a second start would not remove.
soonest_s=${SOONEST_S:-120}

command=$(printf '%q ' .venv/bin/python -m "$@")
for attempt in $(seq 1 "$attempts"); do
    begin=$(date +%s)
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
        --command="cd $(printf '%q' "$folder") && $command"
    status=$?
    if [ "$status" -eq 0 ] || [ $(($(date +%s) - begin)) -lt "$soonest_s" ]; then
        exit "$status"
    fi
    echo "attempt $attempt of $attempts ended with status $status" >&2
done
exit "$status"
