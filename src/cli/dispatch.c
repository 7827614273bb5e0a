#include "cli/dispatch.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/options.h"
#include "cli/output.h"
#include "lily.h"

/* Asked for, it is a result (standard output); after a wrong call it is a message. */
static void print_commands(FILE *to, const struct command *commands, size_t n) {
    fprintf(to, "%s %s: runs Qwen3.6-35B-A3B on this machine\n\nusage: %s COMMAND [options]\n\n",
            program_name, LILY_VERSION, program_name);
    for (size_t i = 0; i < n; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(
        to,
        "\n%s COMMAND --help explains a command. Without -m the small model inside the program\n"
        "answers. Exit status: 0 done, 1 failed, 2 wrong usage, 128 + signal interrupted.\n",
        program_name);
}

/* argv[0] is the command's name. */
static int run_command(const struct command *commands, size_t n, int argc, char **argv) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(argv[0], commands[i].name) == 0) return commands[i].run(argc, argv);
    const char *names[32];
    size_t n_names = 0;
    while (n_names < n && n_names < sizeof names / sizeof *names)
        names[n_names] = commands[n_names].name, n_names++;
    if (!*argv[0]) return usage_error(NULL, "found \"\", expected a command");
    const char *near = nearest_word(argv[0], names, n_names);
    if (near) return usage_error(NULL, "%s: no such command; did you mean %s?", argv[0], near);
    return usage_error(NULL, "%s: no such command", argv[0]);
}

/* A standard stream that the caller closed leaves a number that the next open would get, and an
 * error message would be written into a checkpoint or to a client. The other direction is opened,
 * so that using the stream still fails. */
static void hold_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        int held = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
        if (held > STDERR_FILENO) close(held);
    }
}

int cli_main(const char *program, const struct command *commands, size_t n_commands, int argc,
             char **argv) {
    program_name = program;
    hold_standard_streams();
    /* A reader that leaves (`lily run | head`) is seen as a failed write, not a sudden death. */
    signal(SIGPIPE, SIG_IGN);
    /* A limit on file size, too, is a failed write with a message. */
    signal(SIGXFSZ, SIG_IGN);
    if (argc < 2) {
        print_commands(stderr, commands, n_commands);
        return EXIT_USAGE;
    }
    /* Dashed spellings are taken as well: nobody should have to look up how to ask for help. */
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) {
        printf("lily %s\n", LILY_VERSION);
        return output_status(EXIT_OK);
    }
    /* `lily help run` is `lily run --help`. */
    char help[] = "--help";
    char *help_argv[] = {argc > 2 ? argv[2] : NULL, help, NULL};
    if (strcmp(word, "help") == 0 && argc > 2)
        return output_status(run_command(commands, n_commands, 2, help_argv));
    if (strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        print_commands(stdout, commands, n_commands);
        return output_status(EXIT_OK);
    }
    return output_status(run_command(commands, n_commands, argc - 1, argv + 1));
}
