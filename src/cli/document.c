#include "cli/document.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "cli/output.h"

enum { CELL_ROOM = 256, LINE_ROOM = 1024, COLUMNS_MAX = 16, INLINE_MAX = 4 };

struct view {
    const char *const *byte_names;
};

/* ---- values ---------------------------------------------------------------------------------- */

/* The library's documents give plain integers; their names tell which of them are bytes. */
static bool counts_bytes(const struct view *v, const char *name) {
    size_t n = strlen(name);
    if (n >= 5 && strcmp(name + n - 5, "bytes") == 0) return true;
    for (const char *const *p = v->byte_names; p && *p; p++)
        if (strcmp(*p, name) == 0) return true;
    return false;
}

/* Underscores are for programs, and so is "_bytes": the value is shown with its unit. */
static void format_name(char *out, size_t room, const char *name) {
    const char *unit = strstr(name, "_bytes");
    int shown = unit && !unit[6] ? (int)(unit - name) : (int)strlen(name);
    snprintf(out, room, "%.*s", shown, name);
    for (char *p = out; *p; p++)
        if (*p == '_') *p = ' ';
}

static void format_value(const struct view *v, char *out, size_t room, const char *name,
                         const json_t *value);

/* A list of plain values on one line. */
static void format_list(const struct view *v, char *out, size_t room, const char *name,
                        const json_t *list) {
    size_t used = 0, i;
    json_t *item;
    char cell[CELL_ROOM];
    if (json_array_size(list) == 0) snprintf(out, room, "none");
    json_array_foreach(list, i, item) {
        format_value(v, cell, sizeof cell, name, item);
        if (used < room)
            used += (size_t)snprintf(out + used, room - used, "%s%s", i ? ", " : "", cell);
    }
}

/* A small object on one line: "tensors 357, bytes 11.7 MiB". */
static void format_members(const struct view *v, char *out, size_t room, const json_t *object) {
    size_t used = 0;
    const char *name;
    json_t *item;
    char shown[CELL_ROOM], cell[CELL_ROOM];
    json_object_foreach((json_t *)object, name, item) {
        format_name(shown, sizeof shown, name);
        format_value(v, cell, sizeof cell, name, item);
        if (used < room)
            used +=
                (size_t)snprintf(out + used, room - used, "%s%s %s", used ? ", " : "", shown, cell);
    }
}

static void format_value(const struct view *v, char *out, size_t room, const char *name,
                         const json_t *value) {
    out[0] = 0;
    switch (json_typeof(value)) {
    case JSON_STRING:
        snprintf(out, room, "%s", json_string_value(value));
        break;
    case JSON_INTEGER:
        if (counts_bytes(v, name))
            format_bytes(out, room, (double)json_integer_value(value));
        else
            snprintf(out, room, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(out, room, "%.6g", json_real_value(value));
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
    case JSON_ARRAY:
        format_list(v, out, room, name, value);
        break;
    case JSON_OBJECT:
        format_members(v, out, room, value);
        break;
    }
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Whether all members fit a cell or a line. */
static bool holds_plain_values(const json_t *object) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value) {
        if (json_is_object(value) || json_is_array(value)) return false;
    }
    return true;
}

/* A list of objects: a row each, columns as in the first. */
static bool is_list_table(const json_t *value) {
    return json_is_array(value) && json_is_object(json_array_get(value, 0));
}

/* {"vision": {"tensors": 0, ...}, "mtp": {...}}: a table whose first column is the name. */
static bool is_object_table(const json_t *value) {
    const char *name;
    json_t *row;
    if (json_object_size(value) == 0) return false;
    json_object_foreach((json_t *)value, name, row) {
        if (!json_is_object(row) || !holds_plain_values(row)) return false;
    }
    return true;
}

/* Sentences stand on lines of their own. */
static bool is_text_list(const json_t *value) {
    return json_is_array(value) && json_is_string(json_array_get(value, 0));
}

/* What is said in one line after its name; all else gets a block of its own. */
static bool is_line(const json_t *value) {
    if (json_is_object(value))
        return holds_plain_values(value) && json_object_size(value) <= INLINE_MAX;
    return !is_list_table(value) && !is_text_list(value);
}

/* ---- tables ---------------------------------------------------------------------------------- */

struct table {
    const json_t *rows[CELL_ROOM];
    const char *labels[CELL_ROOM]; /* of an object table's rows */
    size_t n_rows;
    const char *columns[COLUMNS_MAX];
    int width[COLUMNS_MAX];
    size_t n_columns;
    int label_width; /* 0: no labels */
};

/* Widths are int because printf's '*' takes one. */
static int larger(int a, size_t b) {
    return (size_t)a > b ? a : (int)b;
}

/* Rows and columns beyond the limits are left out: this is for reading, --json has all of it. */
static void read_table(struct table *t, const json_t *value) {
    *t = (struct table){0};
    const char *name;
    json_t *row;
    size_t i;
    if (json_is_array(value)) {
        json_array_foreach(value, i, row) {
            if (t->n_rows < CELL_ROOM) t->rows[t->n_rows++] = row;
        }
    } else {
        json_object_foreach((json_t *)value, name, row) {
            if (t->n_rows == CELL_ROOM) break;
            t->labels[t->n_rows] = name;
            t->label_width = larger(t->label_width, strlen(name));
            t->rows[t->n_rows++] = row;
        }
    }
    json_object_foreach((json_t *)t->rows[0], name, row) {
        if (t->n_columns < COLUMNS_MAX && !json_is_object(row)) t->columns[t->n_columns++] = name;
    }
}

static void format_cell(const struct view *v, const struct table *t, size_t row, size_t column,
                        char *out, size_t room) {
    const json_t *value = json_object_get(t->rows[row], t->columns[column]);
    out[0] = 0;
    if (value) format_value(v, out, room, t->columns[column], value);
}

/* Cells are padded but for the last of a line. */
static void print_cell(const struct table *t, size_t column, const char *cell) {
    if (column + 1 < t->n_columns)
        printf("%-*s  ", t->width[column], cell);
    else
        printf("%s\n", cell);
}

/* Two passes over the cells, for a column is as wide as its widest one; formatting twice is cheaper
 * than keeping the texts. */
static void print_table(const struct view *v, const json_t *value, int indent) {
    struct table t;
    char cell[CELL_ROOM];
    read_table(&t, value);
    for (size_t c = 0; c < t.n_columns; c++) {
        t.width[c] = (int)strlen(t.columns[c]);
        for (size_t r = 0; r < t.n_rows; r++) {
            format_cell(v, &t, r, c, cell, sizeof cell);
            t.width[c] = larger(t.width[c], strlen(cell));
        }
    }
    printf("%*s", indent + (t.label_width ? t.label_width + 2 : 0), "");
    for (size_t c = 0; c < t.n_columns; c++) {
        format_name(cell, sizeof cell, t.columns[c]);
        print_cell(&t, c, cell);
    }
    for (size_t r = 0; r < t.n_rows; r++) {
        printf("%*s", indent, "");
        if (t.label_width) printf("%-*s  ", t.label_width, t.labels[r]);
        for (size_t c = 0; c < t.n_columns; c++) {
            format_cell(v, &t, r, c, cell, sizeof cell);
            print_cell(&t, c, cell);
        }
    }
}

/* ---- objects --------------------------------------------------------------------------------- */

static void print_texts(const json_t *list, int indent) {
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) {
        printf("%*s%s\n", indent, "", json_is_string(item) ? json_string_value(item) : "-");
    }
}

/* Names of one level are padded to one width, so that the values form a column. It recurses as
 * deep as the library's own documents do, never as deep as an input. */
static void print_object(const struct view *v, const json_t *object, int indent) {
    const char *name;
    json_t *value;
    char shown[CELL_ROOM], line[LINE_ROOM];
    int width = 0;
    json_object_foreach((json_t *)object, name, value) {
        if (is_line(value)) width = larger(width, strlen(name));
    }
    json_object_foreach((json_t *)object, name, value) {
        format_name(shown, sizeof shown, name);
        /* One member a line, in the library's order, which goes from the general to the detail. */
        if (is_line(value)) {
            format_value(v, line, sizeof line, name, value);
            printf("%*s%-*s  %s\n", indent, "", width, shown, line[0] ? line : "-");
            continue;
        }
        printf("%*s%s:\n", indent, "", shown);
        if (is_list_table(value) || is_object_table(value))
            print_table(v, value, indent + 2);
        else if (is_text_list(value))
            print_texts(value, indent + 2);
        else
            print_object(v, value, indent + 2);
    }
}

void print_document(const json_t *doc, const char *const *byte_names) {
    const struct view view = {byte_names};
    if (json_is_object(doc))
        print_object(&view, doc, 0);
    else if (is_list_table(doc))
        print_table(&view, doc, 0);
}
