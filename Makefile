# lily. `make` lists the targets. Options: BUILD=build/dir CC=clang SAN=address,undefined V=1
BUILD     ?= build/release
REFERENCE ?= ../shared
CC        ?= cc
SAN       ?=
Q         := $(if $(V),,@)
OS        := $(shell uname -s)
ARCH      := $(shell uname -m)
PYTHON    := .venv/bin/python
STANDIN   := models/mini
JOBS      := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
FUZZ_SECONDS ?= 20

WARN   := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -Werror
CFLAGS := -std=c11 -D_GNU_SOURCE -O3 -g -ffp-contract=off $(WARN) -fvisibility=hidden -Iinclude -Isrc
ifneq ($(SAN),)
CFLAGS += -O1 -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
endif

ifeq ($(OS),Darwin)
# brew keeps these two apart from the system's own.
BREW := $(shell brew --prefix 2>/dev/null)
export PKG_CONFIG_PATH := $(BREW)/opt/libedit/lib/pkgconfig:$(BREW)/opt/openssl/lib/pkgconfig:$(PKG_CONFIG_PATH)
CFLAGS += -I$(BREW)/include
LDLIBS_EXTRA := -L$(BREW)/lib
endif
# Libraries: the core needs the first four, linked statically; the full program the others too.
CORE_LIBS := jansson libpcre2-8 libutf8proc libcrypto
FULL_LIBS := libmicrohttpd libedit
LIBS      := $(CORE_LIBS) $(FULL_LIBS)
CFLAGS    += $(shell pkg-config --cflags $(LIBS) 2>/dev/null)
LDLIBS    := $(LDLIBS_EXTRA) $(shell pkg-config --libs $(LIBS) 2>/dev/null) -lpthread -lm -ldl
STATIC    := $(foreach l,jansson pcre2-8 utf8proc crypto,-l:lib$(l).a)

SRC_CORE := $(wildcard src/base/*.c src/model/*.c src/model/shapes/*.c src/ckpt/*.c src/text/*.c \
              src/engine/*.c src/backend/*.c src/backend/ref/*.c src/backend/cpu/*.c \
              src/backend/cpu/kernels/*.c)
# The Metal backend records its steps on every system; the half that talks to Metal is built on macOS,
# and with METAL=1 for tests, which link it with tools/metal_emulator (tests/metal_host).
METAL ?= $(if $(filter Darwin,$(OS)),1)
METAL_DEVICE := $(patsubst %,src/backend/metal/%.c,buffers command device encode metal pressure selftest selftest_attention selftest_compare session source step tensor tensor_attention trace)
METAL_KERNELS := $(wildcard src/backend/metal/kernels/*.metal src/backend/metal/kernels/*.h) src/model/shapes/shape_common.h
SRC_CORE += $(filter-out $(METAL_DEVICE),$(wildcard src/backend/metal/*.c))
ifneq ($(METAL),)
# A program without windows is given a default device only when CoreGraphics is linked.
SRC_CORE += $(METAL_DEVICE)
CFLAGS   += -DLILY_METAL
LDLIBS   += $(if $(filter Darwin,$(OS)),-framework Metal -framework Foundation -framework CoreGraphics -lobjc)
METAL_TEXT := $(BUILD)/src/backend/metal/sources.S.o
endif
ifeq ($(OS),Linux)
SRC_CORE += $(wildcard src/backend/cuda/*.c)
CFLAGS   += -DLILY_CUDA
endif
SRC_FULL := $(SRC_CORE) $(wildcard src/serve/*.c src/cli/*.c)
SRC_FULL := $(filter-out src/cli/core_main.c,$(SRC_FULL))
SRC_LIB  := $(filter-out src/cli/main.c,$(SRC_FULL))
# The core program: engine and the commands that need no network and no terminal.
SRC_CORE += src/cli/core_main.c $(filter-out src/cli/main.c src/cli/core_main.c src/cli/chat.c src/cli/keyboard.c src/cli/serve.c,$(wildcard src/cli/*.c))
# Kernels for an instruction set this machine's compiler does not target are left out.
ifeq ($(filter x86_64 amd64,$(ARCH)),)
FOREIGN := %_avx2.c %_avx512.c
endif
ifeq ($(filter aarch64 arm64,$(ARCH)),)
FOREIGN += %_neon.c
endif
OBJ  = $(patsubst %,$(BUILD)/%.o,$(filter-out $(FOREIGN),$(1)))
# CUDA: the host part is ordinary C; kernels are compiled per shape where there is an nvcc, into a
# folder that all builds share, and embedded. CUDA_TARGETS names what portable kernels are
# compiled for: machine code of a capability, or ptx80 for every card from 8.0 on. Kernels of other
# files are for 9.0a alone.
ifeq ($(OS),Linux)
ifeq ($(origin NVCC),undefined)
NVCC         := $(shell tools/nvcc.sh)
endif
CUDA_TARGETS ?= 90a ptx80
CUDA_SHAPES  := mini qwen36_35b_a3b
empty        :=
CUDA_DIR     := build/kernels/$(subst $(empty) ,-,$(strip $(CUDA_TARGETS)))
CUDA_FILES   := $(patsubst src/backend/cuda/kernels/%.cu,%,$(wildcard src/backend/cuda/kernels/*.cu))
FATBINS      := $(if $(NVCC),$(foreach s,$(CUDA_SHAPES),$(foreach f,$(CUDA_FILES),$(CUDA_DIR)/$(s)/$(f).fatbin)))
CUDA_GENCODE  = $(foreach t,$(if $(filter portable_%,$(1)),$(CUDA_TARGETS),90a),$(if $(filter ptx%,$(t)),-gencode=arch=compute_$(t:ptx%=%)$(,)code=compute_$(t:ptx%=%),-gencode=arch=compute_$(t)$(,)code=sm_$(t)))
KERNELS      := $(BUILD)/src/backend/cuda/kernels.S.o
, := ,
endif
EMBED := $(if $(wildcard $(STANDIN)/model.safetensors),$(BUILD)/src/ckpt/embedded.S.o)
CFLAGS += $(if $(EMBED),-DLILY_EMBEDDED_STANDIN)
EMBED += $(METAL_TEXT)

UNIT  := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c))
FUZZ  := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))

# Objects of tests are kept, so that a second run compiles nothing.
.SECONDARY:
.PHONY: help deps all core demo test tests unit e2e check format fuzz clean metal metal-full metal-emulator cuda-emulator cuda-races release
help:
	@echo "make demo     install what is missing, build, answer a prompt with the embedded stand-in"
	@echo "make test     install what is missing, build, run all tests; unit and e2e: one half of them"
	@echo "make all      build $(BUILD)/lily"
	@echo "make release  the same with CUDA machine code for every card from 8.0 on, build/release-all"
	@echo "make core     build $(BUILD)/lily-core: engine, bench and eval, libraries linked in"
	@echo "make check    format, warnings with gcc and clang, static analysis, layers, sanitizers, fuzzers,"
	@echo "              the Metal emulator's own tests; fuzz: the fuzzers alone"
	@echo "make metal    the Metal backend end to end on the emulated device (Linux; needs clang-19);"
	@echo "              metal-full: more of the same, each kernel alone, the real shape (an hour)"
	@echo "make cuda-emulator  the CUDA backend on an emulated card (x86-64 Linux; some minutes);"
	@echo "              cuda-races: every access of its kernels watched (over ten minutes)"
	@echo "make format   apply clang-format        make deps  install what is missing      make clean"

deps:
	@tools/deps.sh build test
all: $(BUILD)/lily
	@:
core: $(BUILD)/lily-core
	@:
# A second make, since the libraries' flags are only known once they are installed.
demo:
	@tools/deps.sh build
	@$(MAKE) --no-print-directory -j$(JOBS) all
	@tools/demo.sh $(BUILD)/lily
test: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all core tests
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory e2e
tests: $(UNIT)
unit: $(UNIT)
	@REFERENCE=$(REFERENCE) tests/run_unit.sh $(UNIT)
E2E_CLI := tests/e2e/test_cli.py tests/e2e/test_eval.py
e2e: $(BUILD)/lily $(BUILD)/lily-core $(BUILD)/fake-serve $(BUILD)/tests/text_driver $(if $(filter Linux,$(OS)),$(BUILD)/tests/fake/libcuda.so.1)
	@tests/run_pytest.sh $(PYTHON) "tests/e2e --ignore-glob=*/test_server* $(E2E_CLI:%=--ignore=%)" "$(E2E_CLI)" \
	    "tests/e2e/test_server*.py" -- --lily=$(BUILD)/lily --reference=$(REFERENCE)
check:
	@tools/check.sh
metal-emulator:
	@tests/run_pytest.sh $(PYTHON) "tests/metal_emulator --ignore-glob=*/test_prefill* --ignore=tests/metal_emulator/test_contraction.py" \
	    "tests/metal_emulator/test_prefill*.py" --
	@$(MAKE) --no-print-directory -C tests/metal_runtime run chain
metal:
	@$(MAKE) --no-print-directory -C tests/metal_host run
	@$(PYTHON) -B -m pytest -q -rs tests/metal_emulator/test_contraction.py
metal-full: metal-emulator
	@$(MAKE) --no-print-directory -C tests/metal_host full
	@$(PYTHON) -B -m pytest -q -rs tests/metal_emulator/test_contraction.py --full
fuzz: $(FUZZ)
	@tests/fuzz/run.sh $(FUZZ_SECONDS) $(FUZZ)
format:
	clang-format -i $$(git ls-files '*.c' '*.h' 'src/*.metal')
clean:
	rm -rf build

$(BUILD)/lily: $(call OBJ,src/cli/main.c) $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/liblily.a: $(call OBJ,$(SRC_LIB)) $(EMBED) $(KERNELS)
	@rm -f $@
	@echo "  AR   $@"
	$(Q)ar rcs $@ $^
$(BUILD)/lily-core: $(call OBJ,$(SRC_CORE)) $(EMBED) $(KERNELS)
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(if $(filter Linux,$(OS)),$(STATIC),$(LDLIBS)) -lpthread -lm -ldl
# The text layer alone, for tests that compare it with other programs.
$(BUILD)/tests/text_driver: $(call OBJ,tests/text/driver.c $(wildcard src/text/*.c src/base/*.c))
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
# The server over a scripted engine, for tests of timing, hang-ups and hostile clients.
$(BUILD)/fake-serve: $(call OBJ,tests/e2e/fake_engine.c src/text/json_text.c $(wildcard src/serve/*.c src/base/*.c))
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
# A CUDA driver without a card, which programs are led to by LD_LIBRARY_PATH.
$(BUILD)/tests/fake/libcuda.so.1: tests/e2e/fake_libcuda.c tests/unit/cuda_fake.h
	@mkdir -p $(@D)
	@echo "  LINK $@"
	$(Q)$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -fPIC -shared -o $@ $<
$(BUILD)/tests/%: $(BUILD)/tests/unit/%.c.o $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)
# This one is the driver as well, which the backend then finds in the program itself.
$(BUILD)/tests/test_cuda_open: LDLIBS += -rdynamic
# The CUDA backend's checks: on a card (tests/cuda/run.sh; libraries linked in, so that it can be
# carried there), and with the portable kernels on this processor.
CUDA_CHECK_FILES := main older side prompts profile checks checks_stages checks_ties checks_text checks_greedy checks_speed
CUDA_CHECK := $(call OBJ,$(CUDA_CHECK_FILES:%=tests/cuda/%.c))
$(BUILD)/cuda-check: $(CUDA_CHECK) $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(STATIC) -lpthread -lm -ldl
EMULATED := $(BUILD)/tests/cuda/emulated
$(BUILD)/cuda-emulated: $(patsubst %,$(EMULATED)/%.o,$(CUDA_CHECK_FILES) emulator $(filter portable_% batch_%,$(CUDA_FILES))) $(EMULATED)/emulator/table.o $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CXX) $(filter -fsanitize%,$(CFLAGS)) -rdynamic -o $@ $^ $(STATIC) -lpthread -lm -ldl
$(EMULATED)/%.o: tests/cuda/%.c $(wildcard tests/cuda/*.h)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -Itests/cuda -DCUDA_EMULATED -c -o $@ $<
$(EMULATED)/emulator.o: tests/cuda/emulator/emulator.cpp $(wildcard tests/cuda/emulator/*.h)
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=c++17 -O2 -g -Wall -Wextra -Werror -Isrc -Iinclude -c -o $@ $<
$(patsubst %,$(EMULATED)/%.o,$(filter portable_% batch_%,$(CUDA_FILES))): $(EMULATED)/%.o: src/backend/cuda/kernels/%.cu $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cuh tests/cuda/emulator/*) src/backend/cuda/layers.c src/backend/cuda/batch.c
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated)"
	$(Q)tests/cuda/emulator/kernels.sh mini $* >$(@:.o=.cpp)
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Isrc -Isrc/backend/cuda -c -o $@ $(@:.o=.cpp)
# The same kernels telling of every access to a library of ours in the thread sanitizer's place.
WATCHED := $(BUILD)/tests/cuda/watched
$(BUILD)/cuda-watched: $(patsubst %,$(EMULATED)/%.o,$(CUDA_CHECK_FILES) emulator) $(patsubst %,$(WATCHED)/%.o,watch $(filter portable_% batch_%,$(CUDA_FILES))) $(EMULATED)/emulator/table.o $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CXX) $(filter -fsanitize%,$(CFLAGS)) -rdynamic -o $@ $^ $(STATIC) -lpthread -lm -ldl
$(WATCHED)/watch.o: tests/cuda/emulator/watch.cpp tests/cuda/emulator/watch.h
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=c++17 -O2 -g -Wall -Wextra -Werror -c -o $@ $<
# The watch itself: kernels with a mistake each.
$(BUILD)/watch-control: tests/cuda/emulator/watch_control.cpp $(EMULATED)/emulator.o $(WATCHED)/watch.o
	@echo "  LINK $@"
	$(Q)$(CXX) -std=c++17 -O2 -g -fsanitize=thread -Wall -Wextra -Werror -Itests/cuda/emulator -Isrc -Iinclude -c -o $(WATCHED)/control.o $<
	$(Q)$(CXX) -rdynamic -o $@ $(WATCHED)/control.o $(filter %.o,$^) -ldl
$(WATCHED)/%.o: $(EMULATED)/%.o
	@mkdir -p $(@D)
	@echo "  CXX  $* (watched)"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -fsanitize=thread -Wno-unknown-pragmas -Itests/cuda/emulator -Isrc -Isrc/backend/cuda -c -o $@ $(<:.o=.cpp)
ifeq ($(OS)$(ARCH),Linuxx86_64)
# The prompt kernels of sm_90a alone.
$(EMULATED)/prefill.o: tests/cuda/emulator/prefill.cpp $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cu* tests/cuda/*.h tests/cuda/*.cu tests/cuda/emulator/*)
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated)"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Itests/cuda -Isrc -Isrc/backend/cuda -Iinclude -c -o $@ $<
# The batched kernels at the large shape.
$(EMULATED)/batch.o: tests/cuda/emulator/batch.cpp $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cu* tests/cuda/emulator/*)
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated)"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Isrc -Isrc/backend/cuda -Iinclude -c -o $@ $<
# Router times output projection, at every shape.
$(EMULATED)/fuse-%.o: tests/cuda/emulator/fuse.cpp $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/decode_* tests/cuda/emulator/*)
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated, $*)"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Isrc -Isrc/backend/cuda -Iinclude -DSHAPE_HEADER='"model/shapes/$*.h"' -c -o $@ $<
# The whole backend with them, at a shape that they take.
PROMPTS := $(EMULATED)/prompts
$(patsubst %,$(PROMPTS)/%.o,$(filter portable_%,$(CUDA_FILES))): $(PROMPTS)/%.o: src/backend/cuda/kernels/%.cu $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cuh tests/cuda/emulator/*) src/backend/cuda/layers.c src/backend/cuda/batch.c
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated)"
	$(Q)tests/cuda/emulator/kernels.sh prefill $* emulator/prefill_shape.h >$(@:.o=.cpp)
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Itests/cuda -Isrc -Isrc/backend/cuda -Iinclude -c -o $@ $(@:.o=.cpp)
$(PROMPTS)/prompts.o: tests/cuda/emulator/prompts.cpp $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cu* tests/cuda/emulator/*)
	@mkdir -p $(@D)
	@echo "  CXX  $< (emulated)"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -Werror -Itests/cuda/emulator -Itests/cuda -Isrc -Isrc/backend/cuda -Iinclude -c -o $@ $<
$(BUILD)/prompt-emulated: $(patsubst %,$(EMULATED)/%.o,$(CUDA_CHECK_FILES) emulator emulator/prompts) $(patsubst %,$(PROMPTS)/%.o,prompts $(filter portable_%,$(CUDA_FILES))) $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CXX) $(filter -fsanitize%,$(CFLAGS)) -rdynamic -o $@ $^ $(STATIC) -lpthread -lm -ldl
$(BUILD)/sample-emulated: $(call OBJ,tests/cuda/emulator/sample.c) $(EMULATED)/portable_sample.o $(EMULATED)/emulator.o $(BUILD)/liblily.a
	@echo "  LINK $@"
	$(Q)$(CXX) $(filter -fsanitize%,$(CFLAGS)) -o $@ $^ $(STATIC) -lpthread -lm -ldl
$(BUILD)/batch-emulated: $(EMULATED)/batch.o $(EMULATED)/emulator.o
	@echo "  LINK $@"
	$(Q)$(CXX) -o $@ $^
$(BUILD)/fuse-%-emulated: $(EMULATED)/fuse-%.o $(EMULATED)/emulator.o
	@echo "  LINK $@"
	$(Q)$(CXX) -o $@ $^
$(BUILD)/prefill-emulated: $(EMULATED)/prefill.o $(EMULATED)/emulator.o
	@echo "  LINK $@"
	$(Q)$(CXX) -o $@ $^
$(BUILD)/%-watched: tests/cuda/emulator/%.cpp $(EMULATED)/%.o $(EMULATED)/emulator.o $(WATCHED)/watch.o
	@echo "  LINK $@"
	$(Q)$(CXX) -std=c++17 -O2 -g -ffp-contract=off -fsanitize=thread -Wno-unknown-pragmas -Itests/cuda/emulator -Itests/cuda -Isrc -Isrc/backend/cuda -Iinclude -c -o $(WATCHED)/$*.o $<
	$(Q)$(CXX) -rdynamic -o $@ $(WATCHED)/$*.o $(EMULATED)/emulator.o $(WATCHED)/watch.o -ldl
FUSED := $(CUDA_SHAPES:%=$(BUILD)/fuse-%-emulated)
cuda-emulator: $(BUILD)/cuda-emulated $(BUILD)/prompt-emulated $(BUILD)/prefill-emulated $(BUILD)/batch-emulated $(BUILD)/sample-emulated $(FUSED)
	@$(BUILD)/cuda-emulated
	@$(BUILD)/cuda-emulated --capability 90 stages logits batch selftest
	@$(BUILD)/prompt-emulated --capability 90 logits cuts
	@$(BUILD)/prefill-emulated check
	@$(BUILD)/batch-emulated
	@$(BUILD)/sample-emulated
	@for f in $(FUSED); do $$f || exit 1; done
# Who touches what, and what orders it: ten minutes of one processor.
cuda-races: $(BUILD)/watch-control $(BUILD)/cuda-watched $(BUILD)/batch-watched $(BUILD)/prefill-watched
	@$(BUILD)/watch-control
	@$(BUILD)/cuda-watched kinds
	@$(BUILD)/cuda-watched --capability 90 kinds
	@$(BUILD)/batch-watched
	@$(BUILD)/prefill-watched check
else
cuda-emulator cuda-races:
	@echo "skipped: the CUDA emulator switches fibers in x86-64 code for Linux"
endif
# Machine code for every card from 8.0 on instead of PTX that a driver compiles at the first start.
release:
	@$(MAKE) --no-print-directory BUILD=build/release-all CUDA_TARGETS="80 86 89 90a 100 120 ptx80" all core
# Fuzzers need clang and their own build: make CC=clang SAN=fuzzer-no-link,address BUILD=build/fuzz fuzz
$(BUILD)/fuzz/%: $(BUILD)/tests/fuzz/%.c.o $(BUILD)/liblily.a
	@mkdir -p $(@D)
	@echo "  LINK $@"
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer -o $@ $^ $(LDLIBS)

$(BUILD)/src/backend/cpu/kernels/%_avx2.c.o: CFLAGS += -mavx2 -mfma -mf16c
$(BUILD)/src/backend/cpu/kernels/%_avx512.c.o: CFLAGS += -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
$(BUILD)/src/backend/cpu/kernels/%_neon.c.o: CFLAGS += -march=armv8.2-a+dotprod
# Which source this is, compiled anew only when it has changed.
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@{ git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || echo unknown; } >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@
FORCE:
$(BUILD)/src/cli/commit.c.o: $(BUILD)/commit
$(BUILD)/src/cli/commit.c.o: CFLAGS += -DLILY_COMMIT='"$(shell cat $(BUILD)/commit)"'
$(BUILD)/%.c.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  CC   $<"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
$(BUILD)/src/ckpt/embedded.S.o: src/ckpt/embedded.S $(wildcard $(STANDIN)/*)
	@mkdir -p $(@D)
	@echo "  CC   $<"
	$(Q)$(CC) -I$(STANDIN) -c -o $@ $<
$(BUILD)/src/backend/metal/sources.S: tools/metal_sources.sh $(METAL_KERNELS)
	@mkdir -p $(@D)
	@tools/metal_sources.sh $(METAL_KERNELS) >$@
$(BUILD)/src/backend/metal/sources.S.o: $(BUILD)/src/backend/metal/sources.S
	@echo "  CC   $<"
	$(Q)$(CC) -c -o $@ $<

# Kernels: the table of those that could be compiled. One message where none can.
define FATBIN_RULE
$(CUDA_DIR)/$(1)/%.fatbin: src/backend/cuda/kernels/%.cu $(wildcard src/backend/cuda/kernels/*.h src/backend/cuda/kernels/*.cuh src/model/shapes/*.h)
	@mkdir -p $$(@D)
	@echo "  NVCC $$< ($(1))"
	$$(Q)$$(NVCC) -fatbin -O3 -std=c++17 -Isrc -Isrc/backend/cuda -DSHAPE_HEADER='"model/shapes/$(1).h"' $$(call CUDA_GENCODE,$$*) -o $$@.$$$$$$$$ $$< && mv $$@.$$$$$$$$ $$@
endef
$(foreach s,$(CUDA_SHAPES),$(eval $(call FATBIN_RULE,$(s))))
$(BUILD)/src/backend/cuda/kernels.S.o: $(FATBINS) src/backend/cuda/kernels/embed.sh
	@mkdir -p $(@D)
	$(if $(FATBINS),,@echo "  no nvcc: the CUDA backend is left out (make deps installs one)")
	@echo "  CC   kernels.S"
	$(Q)src/backend/cuda/kernels/embed.sh $(FATBINS) >$(@:.o=)
	$(Q)$(CC) -c -o $@ $(@:.o=)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
