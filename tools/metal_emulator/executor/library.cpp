// Compiles through the front end, loads the shared object, keeps what it registers.
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <memory>
#include <unistd.h>

struct msl_library {
    msl::Image *image;
};

namespace msl {
namespace {

Image *loading; // the image whose constructors run

std::map<std::string, std::unique_ptr<Image>> &images() {
    static std::map<std::string, std::unique_ptr<Image>> all;
    return all;
}

std::string quoted(const std::string &text) {
    std::string result = "'";
    for (char c : text) {
        if (c == '\'')
            result += "'\\''";
        else
            result += c;
    }
    return result + "'";
}

std::string command_for(const std::string &file, const msl_compile_options &options) {
    std::string root = options.tool_root == nullptr ? MSL_TOOL_ROOT : options.tool_root;
    std::string command = "cd " + quoted(root) + " && python3 -B -m frontend.build";
    if (options.checked) command += " --checked";
    if (options.contract) command += " --contract";
    if (options.cache_dir != nullptr) command += " --cache " + quoted(options.cache_dir);
    if (options.language != 0) command += " --language " + std::to_string(options.language);
    std::string defines = options.defines == nullptr ? "" : options.defines;
    for (size_t at = 0; at < defines.size();) {
        size_t end = std::min(defines.find(' ', at), defines.size());
        if (end > at) command += " -D " + quoted(defines.substr(at, end - at));
        at = end + 1;
    }
    return command + " " + quoted(file) + " 2>&1";
}

// Runs the front end; *output is the path of the shared object, or the diagnostics.
int run_front_end(const char *source, const msl_compile_options &options, std::string *output) {
    char name[] = "/tmp/msl-XXXXXX";
    int fd = mkstemp(name);
    if (fd < 0) {
        *output = "cannot create a temporary file";
        return -1;
    }
    FILE *file = fdopen(fd, "w");
    bool written = file != nullptr && fputs(source, file) >= 0;
    if (file == nullptr)
        close(fd);
    else
        written = fclose(file) == 0 && written;
    int status = -1;
    FILE *pipe = written ? popen(command_for(name, options).c_str(), "r") : nullptr;
    if (pipe != nullptr) {
        char chunk[4096];
        for (size_t n; (n = fread(chunk, 1, sizeof chunk, pipe)) > 0;) output->append(chunk, n);
        status = pclose(pipe);
    }
    unlink(name);
    while (!output->empty() && output->back() == '\n') output->pop_back();
    return status == 0 ? 0 : -1;
}

int image_extent(dl_phdr_info *info, size_t, void *data) {
    Image *image = (Image *)data;
    if ((const char *)info->dlpi_addr != image->begin) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &segment = info->dlpi_phdr[i];
        const char *end = image->begin + segment.p_vaddr + segment.p_memsz;
        if (segment.p_type == PT_LOAD && end > image->end) image->end = end;
    }
    return 1;
}

Image *load(const std::string &path, bool checked, std::string *problem) {
    auto &slot = images()[path];
    if (slot) return slot.get();
    auto image = std::make_unique<Image>();
    image->path = path;
    image->checked = checked;
    loading = image.get();
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    loading = nullptr;
    link_map *map = nullptr;
    if (handle == nullptr || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
        *problem = dlerror();
        images().erase(path);
        return nullptr;
    }
    image->begin = (const char *)map->l_addr;
    dl_iterate_phdr(image_extent, image.get());
    for (const Constant &c : image->constants)
        image->constant_info.push_back({c.name.c_str(), c.index, c.size});
    slot = std::move(image);
    return slot.get();
}

} // namespace
} // namespace msl

extern "C" void msl_register_kernel(const char *name, void (*run)(const void *),
                                    const msl_parameter_info *parameters, unsigned count,
                                    unsigned max_threads) {
    auto *kernel = new msl::Kernel{name, run, {}, {}, {}};
    for (unsigned i = 0; i < count; i++) {
        const msl_parameter_info &p = parameters[i];
        if (p.source > msl_source::threadgroup_argument) continue;
        msl_binding_kind kind = p.source == msl_source::device_argument     ? MSL_BIND_DEVICE
                                : p.source == msl_source::constant_argument ? MSL_BIND_CONSTANT
                                                                            : MSL_BIND_THREADGROUP;
        msl_access access = p.writable ? MSL_READ_WRITE : MSL_READ;
        kernel->bindings.push_back({kind, access, p.index, p.element_size, p.reference, p.name});
        kernel->alignments.push_back(p.alignment);
    }
    kernel->info = {kernel->name.c_str(), kernel->bindings.data(), kernel->bindings.size(),
                    max_threads == 0 ? (unsigned)MSL_MAX_THREADS : max_threads};
    msl::loading->kernels.push_back(kernel);
}

extern "C" void msl_register_constant(const char *name, unsigned index, void *address,
                                      unsigned size) {
    msl::loading->constants.push_back({name, index, (char *)address, size});
}

extern "C" void msl_register_section(const char *begin, const char *end) {
    msl::loading->tg_begin = begin;
    msl::loading->tg_end = end;
}

int msl_library_compile(const char *source, const msl_compile_options *options,
                        msl_library **library, char *msg) {
    std::string output;
    msl::Image *image = nullptr;
    if (msl::run_front_end(source, *options, &output) == 0) {
        std::string path = output;
        image = msl::load(path, options->checked, &output);
    }
    if (image == nullptr) {
        snprintf(msg, MSL_MESSAGE_MAX, "%s", output.c_str());
        return -1;
    }
    *library = new msl_library{image};
    return 0;
}

void msl_library_free(msl_library *library) {
    delete library;
}

size_t msl_library_kernel_count(const msl_library *library) {
    return library->image->kernels.size();
}
const msl_kernel *msl_library_kernel(const msl_library *library, size_t i) {
    return &library->image->kernels.at(i)->info;
}
const msl_kernel *msl_library_find(const msl_library *library, const char *name) {
    for (const msl::Kernel *kernel : library->image->kernels)
        if (kernel->name == name) return &kernel->info;
    return nullptr;
}
size_t msl_library_constant_count(const msl_library *library) {
    return library->image->constant_info.size();
}
const msl_constant *msl_library_constant(const msl_library *library, size_t i) {
    return &library->image->constant_info.at(i);
}

// For dispatch.cpp, which has no need of the struct.
msl::Image *msl_library_image(const msl_library *library) {
    return library->image;
}
