# Language, flags and warnings, the same for everything that is built here.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# -g1: enough for backtraces and profiles, a fraction of the size and link time of -g.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1 -fno-omit-frame-pointer")
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # With sanitizers clang 14 compiles kernels several times as fast as with -O1, and everything else no slower.
  set(CMAKE_CXX_FLAGS_DEBUG "-O2 -g1 -fno-omit-frame-pointer")
endif()

find_program(CORTADO_CCACHE ccache)
if(CORTADO_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Relative paths and no working directory in the key: all presets and all checkouts share one cache.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
                                  CCACHE_SLOPPINESS=pch_defines,time_macros "${CORTADO_CCACHE}")
endif()

# Call for every target of ours.
function(cortado_target target)
  target_compile_options(
    ${target}
    PRIVATE -Wall
            -Wextra
            # Multiply and add stay two roundings: all machines and variants must compute the same bits.
            -ffp-contract=off
            # Position-independent code may still inline our own functions; clang does by itself.
            $<$<CXX_COMPILER_ID:GNU>:-fno-semantic-interposition>
            # Neither binaries nor messages name the machine they were built on.
            "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/="
            $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
            # Only speaks of calls across object files that are built with different flags; ours never pass vectors.
            $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>
            # gcc 12's false alarm on "text" + std::string (GCC bug 105651).
            $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,14>>:-Wno-restrict>)
  if(CORTADO_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CORTADO_FEW_SIMD_TARGETS)
    target_compile_definitions(${target} PRIVATE CORTADO_FEW_SIMD_TARGETS)
  endif()
  if(CORTADO_SANITIZE)
    # Without pointer-overflow, which quadruples clang's time on kernels: what such a pointer touches, ASan sees.
    target_compile_options(${target} PRIVATE -fsanitize=${CORTADO_SANITIZE} -fno-sanitize-recover=all
                                             $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=pointer-overflow>)
    if(CORTADO_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      # Functions with many accesses call their checks: the largest kernels compile in two thirds of the time.
      target_compile_options(${target} PRIVATE "SHELL:-mllvm -asan-instrumentation-with-call-threshold=60")
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${CORTADO_SANITIZE})
  endif()
endfunction()

# The headers that take most of a compiler's time, read once for all tests, and for the library in the sanitized builds,
# which compile everything anew. The library's other builds do without, so that the preset clang, which compiles
# each file by itself, finds what one does not include. Not for files with flags of their own.
set(CORTADO_PRECOMPILED_HEADERS
    <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <map> <memory> <optional> <span> <string> <vector>)
function(cortado_precompile_headers target)
  target_precompile_headers(${target} PRIVATE ${CORTADO_PRECOMPILED_HEADERS} ${ARGN})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

# With CORTADO_UNITY, the files of a target, a dozen at a time, are compiled as one: headers are read, and what they have
# for everybody is compiled, once for all of them. Kernels, which include themselves (seen when configuring), and files
# with flags of their own are left alone, and so are those that match `apart`. Names of one folder have to differ, in
# anonymous namespaces too; tests that would rather not have a namespace of their own. What a file forgets to include is
# found by the preset clang.
function(cortado_unite target apart)
  if(NOT CORTADO_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    file(STRINGS "${source}" has_kernels REGEX "core/simd.h" LIMIT_COUNT 1)
    if(has_kernels OR source MATCHES "${apart}")
      continue()
    endif()
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE folder)
    string(REGEX REPLACE "^([^/]+)/([^/]+)/.*$" "\\1_\\2" folder "${folder}")
    if(NOT DEFINED count_${folder})
      set(count_${folder} 0)
    endif()
    math(EXPR part "${count_${folder}} / 12")
    math(EXPR count_${folder} "${count_${folder}} + 1")
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${folder}_${part})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # gcc takes what is included for a header.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()
