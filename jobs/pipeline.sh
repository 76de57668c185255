#!/bin/bash
# Jobs that need each other's results:  bash jobs/pipeline.sh FIRST.toml SECOND.toml …
# Each starts when the one before has ended well. If one fails, those after it never start, and Slurm takes them away.
# HDF5 files carry the results: an output is replaced whole or not at all, so the next job reads no half of one.
set -euo pipefail
[ $# -gt 0 ] || set -- jobs/pipeline/covariance.toml jobs/pipeline/direction.toml

after=()
for job in "$@"; do
    number=$(sbatch --parsable "${after[@]}" jobs/pipeline.sbatch "$job")
    number=${number%%;*}             # with several clusters it is NUMBER;CLUSTER
    echo "$number $job"
    after=(--dependency="afterok:$number" --kill-on-invalid-dep=yes)
done
