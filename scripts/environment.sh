# Sourced by the other scripts: makes .venv in the checkout and installs the package there with some extras.

make_environment() { # folder, extras
  local folder=$1 extras=$2 python=${PYTHON:-python3}
  if [ ! -x "$folder/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
      echo "Error: $python is $("$python" --version 2>&1); Python 3.11 to 3.13 is needed. Set PYTHON=/path/to/python3.11" >&2
      exit 4
    }
    "$python" -m venv "$folder" || {
      rm -rf "$folder"
      echo "Error: $python cannot make a virtual environment. On Debian: apt-get install python3-venv" >&2
      exit 4
    }
  fi
  echo "installing spot-deploy[$extras] into $folder (torch is large; minutes the first time)" >&2
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint scripts/constraints.txt --editable ".[$extras]"
}
