/* The commands of the program: one file each, one entry here. */
#ifndef LILY_CLI_COMMAND_H
#define LILY_CLI_COMMAND_H

struct command {
    const char *name;
    const char *summary;               /* one line for `lily --help` */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns the exit status */
};

int cmd_run(int argc, char **argv);
int cmd_chat(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_pack(int argc, char **argv);
int cmd_synth(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_plan(int argc, char **argv);

#endif
