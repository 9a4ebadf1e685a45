# Tests: files ending in _test.cc beside their sources, and everything in tests/<folder>/ that crosses folders. One
# program a folder keeps linking cheap. They run in the source root, so that data is found as tests/golden/....
find_package(GTest REQUIRED)
include(GoogleTest)

# ThreadSanitizer can't map its shadow on kernels with strong address randomisation; run without it where allowed.
set(test_launcher "")
if(CORTADO_SANITIZE MATCHES "thread")
  find_program(CORTADO_SETARCH setarch)
  if(CORTADO_SETARCH)
    set(launcher "${CORTADO_SETARCH}" "${CMAKE_HOST_SYSTEM_PROCESSOR}" -R)
    execute_process(COMMAND ${launcher} true RESULT_VARIABLE refused OUTPUT_QUIET ERROR_QUIET)
    if(refused EQUAL 0)
      set(test_launcher ${launcher})
    endif()
  endif()
endif()

# Everything that has kernels, with those of a device emulated on the CPU: compiled once for all tests.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*/emulated_*.cc")
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
add_library(cortado_emulation STATIC ${sources})
cortado_target(cortado_emulation)
set_target_properties(cortado_emulation PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_options(cortado_emulation PRIVATE -O1)
target_include_directories(cortado_emulation PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(cortado_emulation PUBLIC cortado)

function(cortado_add_test_program name)
  add_executable(${name} ${ARGN})
  cortado_target(${name})
  # What is tested is in the library. Sanitized by clang, tests take three times as long to compile with -O1 as with -O0 and
  # run no faster, but for those with loops of their own over many elements. gcc takes a third longer, which running saves.
  set(optimise -O1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND NOT name MATCHES "^cortado_(codec|collective)_test$")
    set(optimise -O0)
  endif()
  target_compile_options(${name} PRIVATE ${optimise})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE cortado_emulation cortado hwy::hwy nlohmann_json::nlohmann_json GTest::gtest
                                        GTest::gtest_main)
  get_property(first GLOBAL PROPERTY CORTADO_FIRST_TEST_PROGRAM${optimise})
  if(NOT first)
    set_property(GLOBAL PROPERTY CORTADO_FIRST_TEST_PROGRAM${optimise} ${name})
    cortado_precompile_headers(${name} <gtest/gtest.h>)
  else()
    target_precompile_headers(${name} REUSE_FROM ${first})
  endif()
  cortado_unite(${name} "/device_layout_test\\.cc$") # sees kernels whose instances are in cortado_emulation
  if(CORTADO_SANITIZE)
    # Checked in the library; in tests they take a fifth of clang's time.
    target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=null,vptr>)
  endif()
  if(CORTADO_SANITIZE OR name STREQUAL "cortado_codec_test")
    # Few processes a program: starting a sanitized one costs more than most tests, and thousands of short ones cost more
    # than all that codecs do. As many on each of two or four cores.
    set(shards 4)
    math(EXPR last "${shards} - 1")
    foreach(shard RANGE ${last})
      set(test ${name}_${shard})
      add_test(NAME ${test} COMMAND ${test_launcher} $<TARGET_FILE:${name}> --gtest_brief=1
               WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
      set_tests_properties(
        ${test}
        PROPERTIES
          TIMEOUT 600 ENVIRONMENT
          "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${shard};UBSAN_OPTIONS=print_stacktrace=1;TSAN_OPTIONS=halt_on_error=1")
    endforeach()
  else()
    gtest_discover_tests(
      ${name}
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
      DISCOVERY_TIMEOUT 60
      PROPERTIES TIMEOUT 120)
  endif()
endfunction()

if(CORTADO_TEST_PATTERNS)
  list(TRANSFORM CORTADO_TEST_PATTERNS PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE patterns)
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  list(FILTER sources EXCLUDE REGEX "/(mpi|nccl|cuda)_[^/]*$")
  if(sources)
    cortado_add_test_program(cortado_selected_test ${sources})
  endif()
else()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}" "src/*_test.cc" "tests/*.cc")
  list(FILTER sources EXCLUDE REGEX "^tests/(fuzz|compile_fail|emulated)/")
  list(FILTER sources EXCLUDE REGEX "/(mpi|nccl|cuda)_[^/]*$")
  set(programs "")
  foreach(source IN LISTS sources)
    string(REGEX REPLACE "^(src|tests)/([^/]+)/.*$" "\\2" folder "${source}")
    if(CORTADO_SOURCES AND IS_DIRECTORY "${PROJECT_SOURCE_DIR}/src/${folder}" AND NOT folder IN_LIST CORTADO_SOURCES)
      continue() # not all that it tests is in the library
    endif()
    list(APPEND programs cortado_${folder}_test)
    list(APPEND cortado_${folder}_test_sources "${PROJECT_SOURCE_DIR}/${source}")
  endforeach()
  list(REMOVE_DUPLICATES programs)
  foreach(program IN LISTS programs)
    cortado_add_test_program(${program} ${${program}_sources})
  endforeach()
endif()

# What libcortado_cuda.so is, with an emulated device; tests load it. (A sanitized library needs a sanitized program.)
if(TARGET cortado_session_test AND NOT CORTADO_SANITIZE)
  add_library(cortado_emulated MODULE tests/emulated/device_library.cc)
  cortado_target(cortado_emulated)
  target_include_directories(cortado_emulated PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(cortado_emulated PRIVATE cortado_emulation cortado)
  target_link_options(cortado_emulated PRIVATE -Wl,--exclude-libs,ALL)
  add_dependencies(cortado_session_test cortado_emulated)
  set_source_files_properties(
    src/session/device_library_test.cc
    PROPERTIES COMPILE_DEFINITIONS "CORTADO_EMULATED_LIBRARY=\"$<TARGET_FILE:cortado_emulated>\"" SKIP_PRECOMPILE_HEADERS ON)
endif()

# The MPI communicator, in processes. A test after which MPI can't end in order, because collectives are in flight for
# good, has a run of its own, says so at its end and aborts.
if(CORTADO_BUILD_TRANSPORTS AND NOT CORTADO_SANITIZE)
  if(TARGET cortado_mpi)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*/mpi_*_test.cc")
    add_executable(cortado_mpi_test ${sources})
    cortado_target(cortado_mpi_test)
    target_compile_options(cortado_mpi_test PRIVATE -O1)
    target_include_directories(cortado_mpi_test PRIVATE "${PROJECT_SOURCE_DIR}/src")
    target_link_libraries(cortado_mpi_test PRIVATE cortado_mpi MPI::MPI_CXX GTest::gtest)
    add_executable(mpi_least_squares examples/mpi_least_squares.cc)
    cortado_target(mpi_least_squares)
    target_link_libraries(mpi_least_squares PRIVATE cortado_mpi MPI::MPI_CXX)
  endif()
  cortado_add_mpi_test(MpiFault.DeadRankEndsTheJob 3 cortado_mpi_test --gtest_filter=MpiFault.DeadRankEndsTheJob)
  if(TARGET cortado_mpi)
    set_tests_properties(MpiFault.DeadRankEndsTheJob PROPERTIES TIMEOUT 30 PASS_REGULAR_EXPRESSION "rank 1 dies"
                                                                FAIL_REGULAR_EXPRESSION "DeadRankEndsTheJob .*ms")
  endif()
  cortado_add_mpi_test(Example.mpi_least_squares_3_ranks 3 mpi_least_squares)
  cortado_add_mpi_test(Example.mpi_least_squares_topk_4_ranks 4 mpi_least_squares "topk(density=0.1)")
  cortado_add_mpi_test(Example.mpi_least_squares_plan_4_ranks 4 mpi_least_squares examples/mpi_least_squares.json)
  if(CORTADO_BUILD_CLI)
    # The program, as its help shows it: first the file is made, then nothing is left to be measured.
    set(calibrate calibrate -o "${PROJECT_BINARY_DIR}/calibrated.json" --budget 0.5 --codec "cast(bf16)")
    cortado_add_mpi_test(Cli.calibrate_4_ranks 4 cortado_cli ${calibrate} --again)
    cortado_add_mpi_test(Cli.calibrate_4_ranks_keeps_what_is_known 4 cortado_cli ${calibrate})
    cortado_add_mpi_test(
      Cli.calibrate_2_ranks_with_devices 2 cortado_cli calibrate -o "${PROJECT_BINARY_DIR}/calibrated_devices.json" --again
      --budget 0.5 --codec "cast(bf16)" --device-library "$<TARGET_FILE:cortado_emulated>")
    # Before a minute of measuring.
    cortado_add_mpi_test(Cli.calibrate_2_ranks_to_a_file_that_cannot_be 2 cortado_cli calibrate -o
                         "${PROJECT_BINARY_DIR}/no_such_folder/cluster.json")
    if(TARGET cortado_mpi)
      set_tests_properties(Cli.calibrate_2_ranks_to_a_file_that_cannot_be
                           PROPERTIES PASS_REGULAR_EXPRESSION "no_such_folder/cluster.json.*can't be written" TIMEOUT 30)
      set_tests_properties(Cli.calibrate_4_ranks PROPERTIES PASS_REGULAR_EXPRESSION "4 ranks, 1 codecs, over mpi"
                                                            FIXTURES_SETUP calibrated_file)
      set_tests_properties(Cli.calibrate_4_ranks_keeps_what_is_known
                           PROPERTIES PASS_REGULAR_EXPRESSION "keeps 9 of 9 curves" FIXTURES_REQUIRED calibrated_file)
      set_tests_properties(Cli.calibrate_2_ranks_with_devices
                           PROPERTIES PASS_REGULAR_EXPRESSION "2 ranks, 1 codecs, over mpi.*; the file has 1 on devices")
    endif()
  endif()
  foreach(ranks 1 3 4)
    cortado_add_mpi_test(Mpi.Collectives_${ranks}_ranks ${ranks} cortado_mpi_test --gtest_filter=Mpi.*)
  endforeach()
  foreach(test MpiScheme MpiPlanEngine)
    cortado_add_mpi_test(${test}_4_ranks 4 cortado_mpi_test --gtest_filter=${test}.*)
  endforeach()
  foreach(test StalledRankTimesOut AbandonReachesEveryRank MismatchIsToldToEveryRank FailureInASubgroupIsEverybodys)
    foreach(ranks 3 4)
      cortado_add_mpi_test(MpiFault.${test}_${ranks}_ranks ${ranks} cortado_mpi_test --gtest_filter=MpiFault.${test})
      if(TARGET cortado_mpi)
        set_tests_properties(MpiFault.${test}_${ranks}_ranks PROPERTIES PASS_REGULAR_EXPRESSION
                                                                        "all ${ranks} ranks passed MpiFault.${test}")
      endif()
    endforeach()
  endforeach()
endif()

# The NCCL communicator, one rank a device. Skips as the program below.
if(TARGET cortado_nccl AND NOT CORTADO_SANITIZE)
  add_executable(cortado_nccl_test src/collective/nccl_communicator_test.cc)
  cortado_target(cortado_nccl_test)
  target_compile_options(cortado_nccl_test PRIVATE -O1)
  target_include_directories(cortado_nccl_test PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(cortado_nccl_test PRIVATE cortado_nccl NCCL::nccl CUDA::cudart GTest::gtest)
  if(TARGET cuda)
    add_dependencies(cuda cortado_nccl_test)
  endif()
  add_test(NAME Nccl.Communicator COMMAND cortado_nccl_test --gtest_brief=1 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(Nccl.Communicator PROPERTIES TIMEOUT 300 SKIP_REGULAR_EXPRESSION "no CUDA device")
endif()

# What runs on a CUDA device. A program skips everything where there is none, and the test says so.
function(cortado_add_cuda_test name program) # cortado_add_cuda_test(NAME PROGRAM SOURCE... LIBRARIES LIBRARY...)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" LIBRARIES)
  add_executable(${program} ${arg_UNPARSED_ARGUMENTS})
  cortado_target(${program})
  target_compile_options(${program} PRIVATE -O1)
  target_include_directories(${program} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(${program} PRIVATE ${arg_LIBRARIES} CUDA::cudart_static GTest::gtest)
  add_dependencies(cuda ${program})
  add_test(NAME ${name} COMMAND ${program} --gtest_brief=1 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 SKIP_REGULAR_EXPRESSION "no CUDA device")
endfunction()
if(TARGET cortado_cuda)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*/cuda_*_test.cc")
  set(kfac_sources ${sources})
  list(FILTER kfac_sources INCLUDE REGEX "/kfac/")
  list(FILTER sources EXCLUDE REGEX "/kfac/")
  cortado_add_cuda_test(Cuda.DeviceVariants cortado_cuda_test ${sources} LIBRARIES cortado_cuda)
endif()
if(TARGET cortado_cuda_kfac)
  cortado_add_cuda_test(Cuda.Kfac cortado_cuda_kfac_test ${kfac_sources} LIBRARIES cortado_cuda_kfac)
endif()
