#!/usr/bin/env python3
"""Times lily and llama.cpp side by side on the same shapes and threads.

    compare.py --lily build/release/lily --lily-model CUT.lily --peer-model CUT.gguf
               [--peer-python python3] [--threads 2] [--rounds 5] [--prompt 512] [--decode 64]
               [--out bench/cpu-NAME.json]

The two alternate, A B A B, so that whatever else the machine does meets both; medians and the ratio
of medians are reported, and every single value is kept. Make the files with

    lily synth --layers 8 --packed CUT.lily        synth_gguf.py CUT.gguf --layers 8"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import time


def run_json(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def lily(args):
    rows = run_json(
        [args.lily, "bench", "--json", "--backend", "cpu", "-m", args.lily_model, "-d", "0", "-r", "1"]
        + ["-p", str(args.prompt), "-n", str(args.decode), "--threads", str(args.threads)]
    )
    speed = {row["test"]: round(row["tok_s"], 2) for row in rows}
    return speed["prefill"], speed["decode"]


def peer(args):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "time_llama.py")
    r = run_json(
        [args.peer_python, script, args.peer_model, "--threads", str(args.threads), "--repeat", "1"]
        + ["--prompt", str(args.prompt), "--decode", str(args.decode)]
    )
    return r["prefill"][0], r["decode"][0]


def wait_for_quiet(share, limit=600):
    """Returns when other programs used less than that share of the processors for two seconds."""
    end = time.monotonic() + limit
    while share < 1 and time.monotonic() < end:
        a = cpu_times()
        time.sleep(2)
        b = cpu_times()
        if (b[0] - a[0]) / max(b[1] - a[1], 1) < share:
            return


def cpu_times():
    """Busy and total ticks of all processors since start."""
    with open("/proc/stat") as f:
        ticks = [int(x) for x in f.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def processor():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except OSError:
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lily", required=True)
    parser.add_argument("--lily-model", required=True)
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--peer-python", default="python3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--quiet", type=float, default=1, help="wait until others use less than this share")
    parser.add_argument("--out")
    args = parser.parse_args()
    ours, theirs, load = [], [], []
    for i in range(args.rounds):
        load.append(os.getloadavg()[0])
        wait_for_quiet(args.quiet)
        ours.append(lily(args))
        wait_for_quiet(args.quiet)
        theirs.append(peer(args))
        print(f"round {i + 1}: lily {ours[-1]}, llama.cpp {theirs[-1]} (prefill, decode tok/s)", flush=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "rounds": args.rounds,
        "load_before_each_round": [round(x, 2) for x in load],
        "command": "tools/peer/compare.py",
    }
    for column, test in enumerate((f"prefill {args.prompt}", f"decode {args.decode}")):
        a, b = [x[column] for x in ours], [x[column] for x in theirs]
        report[test] = {
            "lily": a,
            "llama.cpp": b,
            "lily_median": statistics.median(a),
            "llama.cpp_median": statistics.median(b),
            "ratio": round(statistics.median(a) / statistics.median(b), 3),
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w") as f:
            f.write(text + "\n")


if __name__ == "__main__":
    main()
