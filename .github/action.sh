#!/usr/bin/env bash
# The steps of action.yml, whose inputs are variables here. `install` installs openreg_ops for the torch that is there;
# `run` checks and tests everything before it fails.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)

read_toml() { # FILE KEY KEY ...
  python -c 'import functools, operator, sys, tomllib
print(functools.reduce(operator.getitem, sys.argv[2:], tomllib.load(open(sys.argv[1], "rb"))))' "$source/$@"
}

install() {
  local version torch index
  version=$(read_toml openreg_tools/pyproject.toml project version)
  index=$(read_toml pyproject.toml project urls Documentation)wheels/
  if [[ -n $TORCH ]] || ! python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    python -m pip install "torch==${TORCH:-2.15.*}" --extra-index-url https://download.pytorch.org/whl/cpu
  fi
  torch=$(python -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])')
  python -m pip install "openreg_tools==$version" "openreg_ops==$version+torch$torch" pytest --extra-index-url "$index"
}

run() {
  local failed=0 number=0 line
  mkdir -p "$SARIF"
  while read -r line; do # xargs splits the words as a shell does, but expands nothing
    [[ -z $line ]] && continue
    xargs openreg-tools check --quiet --sarif "$SARIF/check-$((++number)).sarif" <<<"$line" || failed=1
  done <<<"$CHECK"
  if [[ -n $PYTEST ]]; then
    xargs python -m pytest --device "$DEVICE" ${MISUSE:+--device-misuse="$MISUSE"} ${FORBID:+--device-forbid="$FORBID"} \
      --device-sarif "$SARIF/pytest.sarif" <<<"$PYTEST" || failed=1
  fi
  return $failed
}

"$1"
