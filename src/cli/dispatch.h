/* From a command line to a command. */
#ifndef LILY_CLI_DISPATCH_H
#define LILY_CLI_DISPATCH_H

#include <stddef.h>

#include "cli/command.h"

/* Runs the command that argv[1] names; returns the process's exit status. */
int cli_main(const char *program, const struct command *commands, size_t n_commands, int argc,
             char **argv);

#endif
