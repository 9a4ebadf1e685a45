# Benchmarks: one program a file, with a main() from Google Benchmark unless the file has its own.
find_package(benchmark REQUIRED)
file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/benchmarks/*.cc")
foreach(source IN LISTS sources)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  cortado_target(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/benchmarks")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE cortado hwy::hwy nlohmann_json::nlohmann_json benchmark::benchmark
                                        benchmark::benchmark_main)
endforeach()
