/* lily-core: engine and measurements with few libraries, for machines without a registry. */
#include "cli/command.h"
#include "cli/dispatch.h"

static const struct command commands[] = {
    {"run", "answer one prompt", cmd_run},
    {"bench", "measure prompt and decode speed", cmd_bench},
    {"eval", "perplexity and top-1 accuracy over a text", cmd_eval},
    {"tokenize", "text to tokens and back", cmd_tokenize},
    {"inspect", "what a checkpoint is and whether it fits", cmd_inspect},
    {"pack", "a checkpoint folder to one memory-mapped file", cmd_pack},
    {"synth", "write a random checkpoint for measurements", cmd_synth},
    {"doctor", "this machine, its backends and memory", cmd_doctor},
    {"plan", "what a step costs on a backend: kernels, stages, bytes", cmd_plan},
};

int main(int argc, char **argv) {
    return cli_main("lily-core", commands, sizeof commands / sizeof *commands, argc, argv);
}
