# Benchmarks: one program a file, with a main() from Google Benchmark unless the file has its own.
find_package(benchmark REQUIRED)

# Public codecs to compare with, where they are installed.
add_library(benchmark_references INTERFACE)
foreach(name zstd lz4)
  find_path(CORTADO_${name}_INCLUDE ${name}.h)
  find_library(CORTADO_${name}_LIBRARY ${name})
  if(CORTADO_${name}_INCLUDE AND CORTADO_${name}_LIBRARY)
    string(TOUPPER ${name} upper)
    target_compile_definitions(benchmark_references INTERFACE CORTADO_HAS_${upper})
    target_include_directories(benchmark_references SYSTEM INTERFACE "${CORTADO_${name}_INCLUDE}")
    target_link_libraries(benchmark_references INTERFACE "${CORTADO_${name}_LIBRARY}")
  endif()
endforeach()

add_custom_target(benchmarks) # not part of `all`: tools/bench builds it
function(cortado_add_benchmark source) # cortado_add_benchmark(SOURCE LIBRARY...)
  cmake_path(GET source STEM name)
  add_executable(${name} EXCLUDE_FROM_ALL "${source}")
  add_dependencies(benchmarks ${name})
  cortado_target(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/benchmarks")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${ARGN})
endfunction()

file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/benchmarks/*.cc")
foreach(source IN LISTS sources)
  if(NOT source MATCHES "/cuda_[^/]*$")
    cortado_add_benchmark("${source}" cortado hwy::hwy nlohmann_json::nlohmann_json benchmark::benchmark
                          benchmark::benchmark_main benchmark_references)
  elseif(TARGET cortado_cuda) # has a main() of its own, and needs a device to say more than that there is none
    cortado_add_benchmark("${source}" cortado_cuda CUDA::cudart_static)
    cmake_path(GET source STEM name)
    add_dependencies(cuda ${name})
  endif()
endforeach()
if(TARGET cortado_mpi)
  target_link_libraries(scheme_bench PRIVATE cortado_mpi MPI::MPI_CXX)
  target_compile_definitions(scheme_bench PRIVATE CORTADO_BENCH_HAS_MPI)
endif()
