/* Which source this program was built from. */
#ifndef LILY_CLI_COMMIT_H
#define LILY_CLI_COMMIT_H

/* The commit's name, "-dirty" behind it when files differed; "unknown" outside a repository. */
extern const char *const build_commit;

#endif
