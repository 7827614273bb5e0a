"""Train the stand-in. Runs on any number of GPUs (torchrun) or, tiny, on a CPU.

    torchrun --nproc-per-node 2 train.py --corpus C.xz --total 1100 --stop 560 --state DIR
    ... the same command again resumes from DIR and goes on to --total seconds of training.

The schedule follows the seconds trained so far (all commands together) over --total: warm-up,
constant, then a linear decay; the last part sees the weights as the 4-bit file will hold them.
"""

import argparse
import multiprocessing
import os
import pathlib
import queue
import threading
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import dataset
import model
import optim

WARM_STEPS = 100
BALANCE = 0.02


def feeder(args, rank, device):
    """Generator processes -> pinned copies -> a short queue of batches on the device."""
    ctx = multiprocessing.get_context("spawn")
    q = ctx.Queue(maxsize=args.workers * 2)
    seed = args.seed * 1000003
    jobs = [
        ctx.Process(target=dataset.worker, args=(q, args.tokenizer, args.corpus, seed + rank * 1000 + i, args.rows, args.length, args.bounds, args.mixture), daemon=True)
        for i in range(args.workers)
    ]
    for j in jobs:
        j.start()
    ready = queue.Queue(maxsize=3)

    def move():
        while True:
            ids, weights, pos, cuts = q.get()
            b = [torch.from_numpy(x) for x in (ids, weights, pos, cuts)]
            if device.type == "cuda":
                b = [x.pin_memory().to(device, non_blocking=True) for x in b]
            ids = b[0].long()
            targets = torch.zeros_like(ids)
            targets[:, :-1] = ids[:, 1:]
            ready.put((ids, targets, b[1], b[2], b[3]))

    threading.Thread(target=move, daemon=True).start()
    return ready, jobs


def rates(progress, step, decay_from):
    """Share of the peak learning rate."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    return warm * min(1.0, max(0.0, (1 - progress) / (1 - decay_from)))


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--tokenizer", default=str(dataset.HERE.parent.parent / "models/mini/tokenizer.json"))
    ap.add_argument("--state", required=True, help="folder for the checkpoint to resume from")
    ap.add_argument("--total", type=float, required=True, help="seconds of training in all")
    ap.add_argument("--stop", type=float, default=1e9, help="end this command after so many seconds since its start")
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--length", type=int, default=4096)
    ap.add_argument("--bounds", type=int, default=1024)
    ap.add_argument("--workers", type=int, default=12, help="generator processes of each rank")
    ap.add_argument("--decay-from", type=float, default=0.55, help="share of --total after which the rate falls to zero")
    ap.add_argument("--quantise-from", type=float, default=0.70, help="share of --total after which weights are seen at 4 bits")
    ap.add_argument("--peak", type=float, default=1.0, help="factor on both learning rates")
    ap.add_argument("--parts", help="folder of bf16 weights (export.py --parts) to start from when there is no state")
    ap.add_argument("--trained", type=float, default=0.0, help="seconds trained before, with --parts")
    ap.add_argument("--seed", type=int, default=1, help="of the documents: give a new one to every command of a run")
    ap.add_argument("--mixture", default="", help="changed shares of the documents, as edit=60,tool=20")
    ap.add_argument("--muon-rate", type=float, default=0.02)
    ap.add_argument("--adam-rate", type=float, default=0.003)
    ap.add_argument("--masked", action="store_true", help="attention by mask instead of the variable-length kernel")
    ap.add_argument("--loop", action="store_true", help="the delta rule's scan as a loop of matrix products instead of the kernel")
    ap.add_argument("--eager", action="store_true", help="without torch.compile")
    ap.add_argument("--tiny", action="store_true", help="a 4-layer model, for a rehearsal")
    args = ap.parse_args()
    begin = time.time()
    model.Scan.kernel = not args.loop
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    ready, jobs = feeder(args, rank, device)
    if gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if ranks > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    shape = model.Shape(layers=4, heads=2, head=128, rotary=32, experts=8, chosen=2) if args.tiny else model.Shape()
    net = model.Mini(shape, seed=7, dt=torch.bfloat16 if gpu else torch.float32, compiled=not args.eager, varlen=gpu and not args.masked).to(device)
    matrices, tables, rest = optim.split(net)
    muon = optim.Muon(matrices)
    adam = torch.optim.AdamW(
        [{"params": tables, "share": 1.0, "weight_decay": 0.01}, {"params": rest, "share": 1.0, "weight_decay": 0.0}], lr=args.adam_rate, betas=(0.9, 0.97), eps=1e-10, fused=gpu
    )
    say = (lambda *x: print(*x, flush=True)) if rank == 0 else (lambda *x: None)
    everything = list(net.parameters())
    step, trained, tokens = 0, 0.0, 0
    path = pathlib.Path(args.state) / "state.pt"
    if path.exists():
        s = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(s["net"])
        adam.load_state_dict(s["adam"])
        muon.load({tuple(k): v for k, v in s["muon"]})
        step, trained, tokens = s["step"], s["trained"], s["tokens"]
    elif args.parts:  # weights only, after a loss of the state: the schedule goes on from --trained
        found = {}
        for f in sorted(pathlib.Path(args.parts).glob("part*.safetensors")):
            found.update(load_file(str(f)))
        with torch.no_grad():
            for n, p in net.named().items():
                p.copy_(found[n])
        trained = args.trained
    say(f"start at step {step}, {trained:.0f} s trained, {tokens / 1e6:.1f} M tokens, {ranks} ranks on {device.type}")
    clock = None  # training time starts once the first steps of this command have compiled
    control = torch.zeros(2, device=device)
    progress, first, shown, starved = trained / args.total, step, time.time(), 0
    while True:
        if (step - first) % 8 == 0:  # rank 0 decides on progress and end for all
            now = time.time()
            if clock is None and step - first >= 8:
                if gpu:
                    torch.cuda.synchronize()
                clock = now = time.time()
                say(f"first steps took {now - begin:.1f} s")
            progress = (trained + (now - clock if clock else 0)) / args.total
            control[0], control[1] = progress, float(progress >= 1 or now - begin > args.stop)
            if ranks > 1:
                dist.broadcast(control, 0)
            progress, stop = control.tolist()
            if stop:
                break
        quantised = progress >= args.quantise_from
        starved += ready.empty()
        ids, targets, weights, pos, cuts = ready.get()
        loss, balance, ce = net.loss(ids, targets, weights, pos, cuts, quantised)
        (loss + BALANCE * balance).backward()
        if ranks > 1:
            grads = [p.grad for p in everything]
            flat = torch._utils._flatten_dense_tensors(grads)
            dist.all_reduce(flat)
            flat /= ranks
            torch._foreach_copy_(grads, torch._utils._unflatten_dense_tensors(flat, grads))
        torch.nn.utils.clip_grad_norm_(tables + rest, 1.0)
        lr = rates(progress, step, args.decay_from) * args.peak
        for group in adam.param_groups:
            group["lr"] = lr * args.adam_rate * group["share"]
        adam.step()
        muon.step(lr * args.muon_rate)
        for p in everything:
            p.grad = None
        step += 1
        tokens += ids.numel() * ranks
        if step % 50 == 0 or step - first in (1, 2, 8, 20):
            own = (weights.flatten() == 1).float()
            value = ((ce.detach() * own).sum() / own.sum()).item()
            text = weights.flatten() == dataset.TEXT_WEIGHT
            text_loss = ce.detach()[text].mean().item()
            dt = time.time() - shown
            shown = time.time()
            rate = ids.numel() * ranks * min(50, step - first) / dt
            say(f"step {step} progress {progress:.3f} lr {lr:.3f} {'4-bit ' if quantised else ''}loss {loss.item():.4f} answers {value:.4f} text {text_loss:.3f} "
                f"balance {balance.item():.3f} tokens {tokens / 1e6:.1f} M {rate / 1e3:.0f} K/s starved {starved}")
            if not loss.isfinite():
                say("the loss is not finite: stopped without saving")
                for j in jobs:
                    j.kill()
                os._exit(3)
    if gpu:
        torch.cuda.synchronize()
    trained += time.time() - clock if clock else 0
    if rank == 0:
        pathlib.Path(args.state).mkdir(parents=True, exist_ok=True)
        s = {"net": net.state_dict(), "adam": adam.state_dict(), "muon": [(list(k), v) for k, v in muon.state().items()], "step": step, "trained": trained, "tokens": tokens}
        torch.save(s, path)
        say(f"saved at step {step}, {trained:.0f} s trained, {tokens / 1e6:.1f} M tokens" + (f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if gpu else ""))
    for j in jobs:
        j.kill()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # the feeder thread waits for ever


if __name__ == "__main__":
    main()
