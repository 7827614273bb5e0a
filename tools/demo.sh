#!/bin/sh
# The main job on the model inside the program: a prompt is answered in a stream, then the speed of
# prompt and answer, the backend and the memory used are shown.
#   tools/demo.sh build/release/lily
set -eu
lily=${1:?usage: tools/demo.sh PATH-TO-LILY}
prompt="What is 17 + 25?"

echo "This machine:"
"$lily" doctor | sed 's/^/  /'
echo
echo "\$ lily run --stats \"$prompt\""
"$lily" run --stats "$prompt"
echo
echo "Next: $lily chat, $lily serve, or $lily --help. The real model: -m FOLDER."
