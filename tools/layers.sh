#!/bin/sh
# Who may include whom: nothing below reaches up, backends never include each other, cli and serve
# see only lily.h and base (serve also text). Prints every include that breaks a rule.
cd "$(dirname "$0")/.." || exit 1

allowed() { # the folders (or headers) that files under $1 may include
    case $1 in
    src/base/*) echo "base" ;;
    src/model/*) echo "base model" ;;
    src/ckpt/*) echo "base model ckpt" ;;
    src/text/*) echo "base text" ;;
    src/backend/*/*)
        backend=${1#src/backend/}
        echo "base model backend/backend.h backend/selftest.h backend/${backend%%/*}"
        ;;
    src/backend/*) echo "base model backend" ;;
    src/engine/*) echo "base model ckpt text backend/backend.h engine lily.h" ;;
    src/serve/*) echo "base text serve lily.h" ;;
    src/cli/serve.c) echo "base cli lily.h serve/serve.h" ;;
    src/cli/*) echo "base cli lily.h" ;;
    esac
}

broken=0
for file in $(git ls-files 'src/*.c' 'src/*.h'); do
    for include in $(sed -n 's/^ *# *include "\([^"]*\)".*/\1/p' "$file"); do
        case $include in
        */* | lily.h) ;;
        *) continue ;; # beside the file itself
        esac
        ok=no
        for rule in $(allowed "$file"); do
            case $include in
            "$rule" | "$rule"/*) ok=yes ;;
            esac
        done
        if [ $ok = no ]; then
            echo "$file includes \"$include\", allowed: $(allowed "$file")"
            broken=$((broken + 1))
        fi
    done
done
[ $broken -eq 0 ]
