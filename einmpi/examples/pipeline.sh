#!/bin/bash
# Jobs that need each other's results:  bash jobs/pipeline.sh FIRST.toml SECOND.toml …
# Each starts when the one before has succeeded. If one fails, Slurm removes those after it.
# They pass results in HDF5 files, which are replaced as a whole or not at all.
set -euo pipefail
[ $# -gt 0 ] || set -- jobs/pipeline/covariance.toml jobs/pipeline/direction.toml

after=()
for job in "$@"; do
    number=$(sbatch --parsable "${after[@]}" jobs/pipeline.sbatch "$job")
    number=${number%%;*}             # with several clusters the output is NUMBER;CLUSTER
    echo "$number $job"
    after=(--dependency="afterok:$number" --kill-on-invalid-dep=yes)
done
