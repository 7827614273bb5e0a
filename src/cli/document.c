#include "cli/document.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "cli/output.h"

enum { CELL_ROOM = 256, COLUMNS_MAX = 16 };

static bool is_bytes(const char *name) {
    size_t n = strlen(name);
    return n >= 5 && strcmp(name + n - 5, "bytes") == 0;
}

/* Underscores are for programs. */
static void format_name(char *out, size_t room, const char *name) {
    snprintf(out, room, "%s", name);
    for (char *p = out; *p; p++)
        if (*p == '_') *p = ' ';
}

static void format_value(char *out, size_t room, const char *name, const json_t *v) {
    out[0] = 0;
    switch (json_typeof(v)) {
    case JSON_STRING:
        snprintf(out, room, "%s", json_string_value(v));
        break;
    case JSON_INTEGER:
        if (is_bytes(name))
            format_bytes(out, room, (double)json_integer_value(v));
        else
            snprintf(out, room, "%lld", (long long)json_integer_value(v));
        break;
    case JSON_REAL:
        snprintf(out, room, "%.6g", json_real_value(v));
        break;
    case JSON_TRUE:
        snprintf(out, room, "yes");
        break;
    case JSON_FALSE:
        snprintf(out, room, "no");
        break;
    case JSON_NULL:
        snprintf(out, room, "-");
        break;
    case JSON_ARRAY: {
        /* A list of plain values on one line. */
        size_t used = 0, i;
        json_t *item;
        json_array_foreach(v, i, item) {
            char cell[CELL_ROOM];
            format_value(cell, sizeof cell, name, item);
            if (used < room)
                used += (size_t)snprintf(out + used, room - used, "%s%s", i ? ", " : "", cell);
        }
        break;
    }
    case JSON_OBJECT:
        break;
    }
}

static bool is_table(const json_t *v) {
    return json_is_array(v) && json_array_size(v) && json_is_object(json_array_get(v, 0));
}

/* Columns are the names of the first row's plain values. */
static size_t table_columns(const json_t *rows, const char **names) {
    size_t n = 0;
    const char *name;
    json_t *v;
    json_object_foreach(json_array_get(rows, 0), name, v) {
        if (n < COLUMNS_MAX && !json_is_object(v) && !is_table(v)) names[n++] = name;
    }
    return n;
}

static void print_table(const json_t *rows, int indent) {
    const char *names[COLUMNS_MAX];
    int width[COLUMNS_MAX];
    char cell[CELL_ROOM];
    size_t columns = table_columns(rows, names), i;
    json_t *row;
    for (size_t c = 0; c < columns; c++) {
        width[c] = (int)strlen(names[c]);
        json_array_foreach(rows, i, row) {
            const json_t *v = json_object_get(row, names[c]);
            if (v) format_value(cell, sizeof cell, names[c], v);
            if (v && (int)strlen(cell) > width[c]) width[c] = (int)strlen(cell);
        }
    }
    printf("%*s", indent, "");
    for (size_t c = 0; c < columns; c++) {
        format_name(cell, sizeof cell, names[c]);
        printf("%-*s", c + 1 < columns ? width[c] + 2 : 0, cell);
    }
    json_array_foreach(rows, i, row) {
        printf("\n%*s", indent, "");
        for (size_t c = 0; c < columns; c++) {
            const json_t *v = json_object_get(row, names[c]);
            cell[0] = 0;
            if (v) format_value(cell, sizeof cell, names[c], v);
            printf("%-*s", c + 1 < columns ? width[c] + 2 : 0, cell);
        }
    }
    putchar('\n');
}

static void print_object(const json_t *object, int indent) {
    const char *name;
    json_t *v;
    char shown[CELL_ROOM], value[4 * CELL_ROOM];
    int width = 0;
    json_object_foreach((json_t *)object, name, v) {
        if (!json_is_object(v) && !is_table(v) && (int)strlen(name) > width)
            width = (int)strlen(name);
    }
    json_object_foreach((json_t *)object, name, v) {
        format_name(shown, sizeof shown, name);
        if (json_is_object(v) || is_table(v)) {
            printf("%*s%s:\n", indent, "", shown);
            if (json_is_object(v))
                print_object(v, indent + 2);
            else
                print_table(v, indent + 2);
            continue;
        }
        if (json_is_array(v) && json_array_size(v) == 0)
            snprintf(value, sizeof value, "none");
        else
            format_value(value, sizeof value, name, v);
        printf("%*s%-*s  %s\n", indent, "", width, shown, value);
    }
}

void print_document(const json_t *doc) {
    if (json_is_object(doc))
        print_object(doc, 0);
    else if (is_table(doc))
        print_table(doc, 0);
}
