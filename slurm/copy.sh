#!/usr/bin/env bash
# Copies a folder, once, however many jobs of this machine want it at the same time; a copy is whole or not there.
#   copy.sh FROM TO
set -euo pipefail
from=$1 to=$2 patience=3600
if [ ! -d "$from" ]; then
    echo "error: there is no folder $from to copy to $(hostname); correct stage_from" >&2
    exit 2
fi
mkdir -p "$(dirname "$to")"
exec 9> "$to.lock"
if ! flock --timeout "$patience" 9; then
    echo "error: another job has been copying to $to on $(hostname) for $patience s" >&2
    exit 1
fi
if [ ! -e "$to" ]; then
    rm -rf "$to.part"
    cp -R "$from" "$to.part"
    mv "$to.part" "$to"
fi
