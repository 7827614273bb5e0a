#!/bin/sh
# The main job on the small model inside the program: a prompt is answered in a stream, then the
# speed of prompt and answer, the backend and the memory used are shown.
#   tools/demo.sh build/release/lily
set -eu
lily=${1:?usage: tools/demo.sh PATH-TO-LILY}
prompt="What is 17 + 25?"

echo "$("$lily" --version), with the small model that is built into it. It thinks, then it answers:"
echo
echo "\$ lily run --stats \"$prompt\""
"$lily" run --stats "$prompt" 2>&1
echo
echo "Next: $lily chat, $lily serve, $lily --help. The real model: -m FOLDER."
