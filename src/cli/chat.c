/* lily chat: a conversation in the terminal. */
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <pwd.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/interrupt.h"
#include "cli/keyboard.h"
#include "cli/output.h"

enum { HISTORY_LINES = 1000 };

struct chat_options {
    struct model_options model;
    struct sampling_options sampling;
    const char *system, *tools, *history;
    bool no_think, no_history;
};

struct chat {
    struct conversation talk;
    struct buf tools, line, history_path;
    bool watched; /* a terminal on both sides: line editing, prompts, speed after each answer */
    EditLine *edit;
    History *history;
    struct keyboard keyboard;
    const char *prompt; /* what the running read shows */
    bool leaving;
    bool failed; /* a turn or a command did: the exit status tells it to whoever piped them in */
};

/* ---- reading lines --------------------------------------------------------------------------- */

enum line_status { LINE_READ, LINE_END, LINE_INTERRUPTED };

/* EL_PROMPT: libedit asks on every redraw, and wants a char * that it does not change. */
static char *show_prompt(EditLine *edit) {
    struct chat *c;
    el_get(edit, EL_CLIENTDATA, &c);
    return (char *)c->prompt;
}

/* EL_GETCFN */
static int read_key(EditLine *edit, wchar_t *out) {
    struct chat *c;
    el_get(edit, EL_CLIENTDATA, &c);
    return keyboard_read(&c->keyboard, out);
}

static void redraw(void *arg) {
    struct chat *c = arg;
    el_set(c->edit, EL_REFRESH);
}

/* ~/.local/state/lily/history, its folders made; the account's own entry names the home. */
static bool default_history(struct buf *path) {
    static const char *const folders[] = {"/.local", "/state", "/lily"};
    const struct passwd *user = getpwuid(getuid());
    if (!user || !user->pw_dir || !buf_puts(path, user->pw_dir)) return false;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        if (!buf_puts(path, folders[i])) return false;
        if (mkdir(path->data, 0700) && errno != EEXIST) return false;
    }
    return buf_puts(path, "/history");
}

/* Lines of earlier chats. A file that holds something else was named by mistake: it is left as it
 * is, and nothing is kept. */
static void load_history(struct chat *c) {
    HistEvent event;
    struct stat st;
    const char *path = c->history_path.data;
    if (stat(path, &st) || st.st_size == 0) return; /* none yet */
    if (access(path, R_OK))
        fail_text("%s: cannot read earlier lines: %s; lines are not kept", path, strerror(errno));
    else if (history(c->history, &event, H_LOAD, path) < 0)
        fail_text(
            "%s: found no history of typed lines, expected one or no file; lines are not kept",
            path);
    else
        return;
    buf_free(&c->history_path);
}

/* Line editing with history. Whatever fails here leaves a chat that still reads lines. */
static void start_editing(struct chat *c, const struct chat_options *o) {
    HistEvent event;
    /* Line editing counts characters: without a UTF-8 locale it would count bytes. */
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1 && !setlocale(LC_CTYPE, "C.UTF-8")) setlocale(LC_CTYPE, "en_US.UTF-8");
    c->edit = el_init("lily", stdin, stdout, stderr);
    c->history = history_init();
    if (!c->edit || !c->history) return;
    el_set(c->edit, EL_CLIENTDATA, c);
    el_set(c->edit, EL_PROMPT, show_prompt);
    el_set(c->edit, EL_EDITOR, "emacs");
    /* Its own reader would restart a read that a signal ended, and Ctrl-C would wait for a key. */
    el_set(c->edit, EL_GETCFN, read_key);
    el_set(c->edit, EL_SIGNAL, 1);
    el_set(c->edit, EL_HIST, history, c->history);
    el_source(c->edit, NULL);
    history(c->history, &event, H_SETSIZE, HISTORY_LINES);
    history(c->history, &event, H_SETUNIQUE, 1);
    if (o->no_history) return;
    if (o->history ? !buf_puts(&c->history_path, o->history) : !default_history(&c->history_path))
        buf_free(&c->history_path);
    if (c->history_path.len) load_history(c);
}

/* Written once, at the end: what a crash loses is worth less than a file rewritten at each line. */
static void end_editing(struct chat *c) {
    HistEvent event;
    if (c->history && c->history_path.len) {
        mode_t mask = umask(077); /* what was typed is the user's alone */
        if (history(c->history, &event, H_SAVE, c->history_path.data) < 0)
            fail_text("%s: cannot keep the typed lines: %s", c->history_path.data, strerror(errno));
        umask(mask);
    }
    if (c->history) history_end(c->history);
    if (c->edit) el_end(c->edit);
}

/* One line without its end appended to c->line. */
static enum line_status read_part(struct chat *c, const char *prompt) {
    const char *text = NULL;
    char *plain = NULL;
    size_t room = 0;
    int n = 0;
    c->prompt = prompt;
    errno = 0;
    if (c->edit) {
        text = el_gets(c->edit, &n);
    } else {
        ssize_t got = getline(&plain, &room, stdin);
        text = got >= 0 ? plain : NULL;
        n = (int)got;
        if (got < 0 && errno && !interrupted()) { /* not the end of the input but a fault */
            fail_text("standard input: %s", strerror(errno));
            c->failed = true;
        }
    }
    enum line_status status = LINE_READ;
    if (!text || n <= 0)
        status = interrupted() ? LINE_INTERRUPTED : LINE_END;
    else if (!buf_append(&c->line, text, (size_t)n))
        status = LINE_END;
    free(plain);
    if (c->line.len && c->line.data[c->line.len - 1] == '\n') c->line.data[--c->line.len] = 0;
    return status;
}

/* An entry: lines joined while they end with a backslash. */
static enum line_status read_entry(struct chat *c, const char *prompt) {
    HistEvent event;
    buf_clear(&c->line);
    if (!buf_puts(&c->line, "")) return LINE_END;
    enum line_status status = read_part(c, prompt);
    while (status == LINE_READ && c->line.len && c->line.data[c->line.len - 1] == '\\') {
        c->line.data[c->line.len - 1] = '\n';
        status = read_part(c, "... ");
        if (status == LINE_END) break; /* the end of input ends the entry as well */
    }
    if (status == LINE_END && c->line.len) status = LINE_READ;
    if (status == LINE_READ && c->history && c->line.len)
        history(c->history, &event, H_ENTER, c->line.data);
    return status;
}

/* ---- commands -------------------------------------------------------------------------------- */

static void do_help(void);

/* Without an argument it tells the state. */
static int do_think(struct chat *c, const char *argument) {
    if (strcmp(argument, "on") == 0)
        c->talk.thinking = true;
    else if (strcmp(argument, "off") == 0)
        c->talk.thinking = false;
    else if (*argument)
        return fail_text("/think: found \"%s\", expected on or off", argument);
    printf("thinking is %s\n", c->talk.thinking ? "on" : "off");
    return EXIT_OK;
}

/* The turns stay: a new instruction in the middle of a talk is a thing to try. */
static int do_system(struct chat *c, const char *argument) {
    lily_err err = {0};
    if (conversation_set_system(&c->talk, argument, &err)) return fail(&err);
    puts(c->talk.system ? "system message set" : "no system message");
    return EXIT_OK;
}

/* Refuses an existing file: a conversation typed over another is not undone. */
static int do_save(struct chat *c, const char *argument) {
    lily_err err = {0};
    if (!*argument) return fail_text("/save: expected a file name");
    if (conversation_save(&c->talk, argument, &err)) return fail(&err);
    printf("saved to %s\n", argument);
    return EXIT_OK;
}

static int do_reset(struct chat *c, const char *argument) {
    (void)argument;
    conversation_reset(&c->talk);
    puts("a new conversation");
    return EXIT_OK;
}

static int do_quit(struct chat *c, const char *argument) {
    (void)argument;
    c->leaving = true;
    return EXIT_OK;
}

static int show_help(struct chat *c, const char *argument) {
    (void)c, (void)argument;
    do_help();
    return EXIT_OK;
}

static const struct chat_command {
    const char *name, *argument, *help;
    int (*run)(struct chat *c, const char *argument);
} chat_commands[] = {
    {"help", "", "this list", show_help},
    {"reset", "", "forget the conversation; the system message stays", do_reset},
    {"think", "on|off", "whether the model thinks before it answers", do_think},
    {"system", "TEXT", "set the system message; without TEXT: none", do_system},
    {"save", "FILE", "write the conversation as JSON messages", do_save},
    {"quit", "", "leave, as Ctrl-D does", do_quit},
};
enum { N_CHAT_COMMANDS = sizeof chat_commands / sizeof *chat_commands };

static void do_help(void) {
    for (size_t i = 0; i < N_CHAT_COMMANDS; i++)
        printf("/%-7s %-7s %s\n", chat_commands[i].name, chat_commands[i].argument,
               chat_commands[i].help);
    puts("A line that ends with \\ goes on in the next. // begins a message with a slash.\n"
         "Ctrl-C stops an answer, Ctrl-D leaves.");
}

/* text is what followed the slash; it is cut apart in place. */
static void run_chat_command(struct chat *c, char *text) {
    size_t n = strcspn(text, " \t");
    char *argument = text + n;
    argument += strspn(argument, " \t");
    text[n] = 0;
    const char *names[N_CHAT_COMMANDS];
    for (size_t i = 0; i < N_CHAT_COMMANDS; i++) {
        names[i] = chat_commands[i].name;
        if (strcmp(text, names[i]) == 0) {
            if (chat_commands[i].run(c, argument)) c->failed = true;
            return;
        }
    }
    const char *near = nearest_word(text, names, N_CHAT_COMMANDS);
    c->failed = true;
    fail_text("/%s: no such command; %s%s", text, near ? "did you mean /" : "see /",
              near ? near : "help");
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* A stopped answer may be empty: without a word the screen would look as if nothing had happened.
 */
static void print_turn_end(const struct chat *c, const struct printout *a, const lily_result *r) {
    if (r->finish == LILY_FINISH_CANCELLED) puts(c->watched ? "\033[2m(stopped)\033[0m" : "");
    if (!c->watched) return;
    fputs("\033[2m", stdout);
    if (r->finish == LILY_FINISH_LENGTH) fputs("(cut: the length limit is reached) ", stdout);
    print_speed(stdout, a, r);
    fputs("\033[0m\n", stdout);
}

/* Asks for the result of each call of the last turn; false: the user would rather not. */
static bool ask_tool_results(struct chat *c, const json_t *calls) {
    size_t i;
    json_t *call;
    lily_err err = {0};
    json_array_foreach(calls, i, call) {
        char prompt[128];
        snprintf(prompt, sizeof prompt, "result of %s> ",
                 json_string_value(json_object_get(call, "name")));
        if (read_entry(c, prompt) != LINE_READ) {
            if (c->watched) puts("\n(no result given)");
            return false;
        }
        if (conversation_add(&c->talk, "tool", c->line.data, c->line.len, &err)) {
            fail(&err);
            return false;
        }
    }
    return true;
}

/* The model's turn; goes on while it calls tools and their results are given. *answered is false
 * when it was stopped before its first token. */
static int take_turn(struct chat *c, bool *answered, lily_err *err) {
    bool again;
    do {
        struct printout answer;
        lily_result result;
        printout_start(&answer, false);
        interrupt_clear();
        if (c->edit) interrupt_release();
        int rc = conversation_answer(&c->talk, &answer, &result, err);
        if (c->edit) interrupt_hold();
        if (!rc) print_turn_end(c, &answer, &result);
        *answered = !rc && (result.finish != LILY_FINISH_CANCELLED || result.output_tokens > 0);
        /* Nobody reads any more: further answers would only burn time. */
        if (!rc && answer.output_failed) c->leaving = true;
        again = !rc && result.finish == LILY_FINISH_TOOLS && !c->leaving;
        if (again) again = ask_tool_results(c, answer.calls);
        printout_free(&answer);
        if (rc) return rc;
    } while (again);
    return LILY_OK;
}

/* One entry of the user: a command, or a message and the turns that follow from it. A turn that
 * fails, or is stopped before it begins, leaves the conversation as it was before. */
static void take_entry(struct chat *c) {
    lily_err err = {0};
    char *text = c->line.data;
    if (strspn(text, " \t\n") == c->line.len) return;
    if (text[0] == '/' && text[1] != '/') {
        run_chat_command(c, text + 1);
        return;
    }
    const size_t before = conversation_length(&c->talk);
    const size_t escaped = text[0] == '/'; /* "//" begins a message with a slash */
    int rc = conversation_add(&c->talk, "user", text + escaped, c->line.len - escaped, &err);
    bool answered = false;
    if (!rc) rc = take_turn(c, &answered, &err);
    if (!rc && answered) return;
    conversation_cut(&c->talk, before);
    if (!rc) return;
    c->failed = true;
    fail(&err);
    if (rc == LILY_ECONTEXT) fputs("lily: /reset begins a new conversation\n", stderr);
}

/* SIGTERM and SIGHUP end the program; Ctrl-C does not. */
static bool told_to_leave(void) {
    return interrupted() && interrupted() != SIGINT;
}

/* The loop behind the prompt, until Ctrl-D, /quit or a signal. At a terminal Ctrl-C is let in where
 * a key is awaited and while an answer is computed. */
static void talk(struct chat *c) {
    if (c->edit) interrupt_hold();
    while (!c->leaving && !told_to_leave()) {
        interrupt_clear();
        enum line_status status = read_entry(c, "> ");
        if (status == LINE_READ) take_entry(c);
        if (status == LINE_INTERRUPTED && !told_to_leave()) puts("\n(Ctrl-D leaves)");
        if (status == LINE_END) {
            if (c->watched) putchar('\n');
            break;
        }
        output_flush();
    }
    if (c->edit) interrupt_release();
}

/* ---- the command ----------------------------------------------------------------------------- */

/* Files before the model: a wrong name should not cost a load. */
static int chat(struct chat_options *o, struct chat *c, lily_err *err) {
    lily_engine_info info;
    int rc = o->tools ? read_json_array(o->tools, &c->tools, err) : LILY_OK;
    if (!rc) rc = model_open(&o->model, 0, &c->talk.engine, err);
    if (rc) return rc;
    c->talk.sampling = &o->sampling;
    c->talk.tools = c->tools.data;
    c->talk.thinking = !o->no_think;
    rc = conversation_set_system(&c->talk, o->system, err);
    if (!rc) rc = conversation_start(&c->talk, err);
    if (rc) return rc;
    /* With a pipe on either side it is a filter: no prompts, no colours, no editing. */
    c->watched = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    if (c->watched) {
        lily_engine_get_info(c->talk.engine, &info);
        printf("%s on %s (%s), context %d. /help lists commands, Ctrl-D leaves.\n", info.model_name,
               info.backend, info.device, (int)info.context);
        c->keyboard = (struct keyboard){.session = c->talk.session, .redraw = redraw, .arg = c};
        keyboard_open(&c->keyboard);
        start_editing(c, o);
    }
    talk(c);
    end_editing(c);
    keyboard_close(&c->keyboard);
    return LILY_OK;
}

int cmd_chat(int argc, char **argv) {
    struct chat_options o = {.model = MODEL_DEFAULTS};
    const struct option options[] = {
        OPT(TEXT, "system", 's', &o.system, "TEXT", "system message"),
        OPT_FLAG("no-think", 0, &o.no_think, "answer at once, without a think block"),
        OPT(NAME, "tools", 0, &o.tools, "FILE",
            "JSON array of tools; you are asked for the result of each call"),
        OPT(NAME, "history", 0, &o.history, "FILE",
            "lines typed earlier; without it ~/.local/state/lily/history"),
        OPT_FLAG("no-history", 0, &o.no_history, "neither read nor keep them"),
        SAMPLING_OPTIONS(&o.sampling),
        MODEL_OPTIONS(&o.model),
    };
    const struct usage usage = {
        .command = "chat",
        .summary = "talk in the terminal",
        .about = "Lines can be edited and recalled; one that ends with a backslash goes on in the "
                 "next. Ctrl-C stops the answer, Ctrl-D leaves, /help lists the commands. After "
                 "each answer its speed is shown and how many tokens of the conversation did not "
                 "have to be read again.",
        .example = "lily chat --system \"Answer in one sentence.\"",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status == OPTIONS_GO_ON) status = sampling_check(&o.sampling, "chat");
    if (status != OPTIONS_GO_ON) return status;
    if (o.history && o.no_history)
        return usage_error("chat", "give one of --history and --no-history");
    struct chat c = {0};
    lily_err err = {0};
    interrupt_catch();
    int rc = chat(&o, &c, &err);
    conversation_free(&c.talk);
    lily_engine_close(c.talk.engine);
    buf_free(&c.tools);
    buf_free(&c.line);
    buf_free(&c.history_path);
    if (rc) return fail(&err);
    if (told_to_leave()) return 128 + interrupted();
    return c.failed && !c.watched ? EXIT_FAILED : EXIT_OK;
}
