# The Python module cortado._core. Its own headers and the binary know no torch; tools/check_symbols proves it. From
# CPython 3.12 on one binary serves all versions (stable ABI).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module
             OPTIONAL_COMPONENTS Development.SABIModule)
# Asked anew each time: pip's build environment, and nanobind with it, lies elsewhere in every build.
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir OUTPUT_VARIABLE nanobind_dir
                        OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED PATHS "${nanobind_dir}" NO_DEFAULT_PATH)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/*.cc")
if(NOT sources)
  message(FATAL_ERROR "CORTADO_BUILD_PYTHON is on and python/ has no *.cc")
endif()
nanobind_add_module(_core STABLE_ABI NB_STATIC NB_DOMAIN cortado ${sources})
cortado_target(_core)
target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}")
target_link_libraries(_core PRIVATE cortado)
# What is exported could stand in for the same symbol of a library that is loaded later: linked with a static libstdc++,
# _core would give torch its own destructors (tools/check_symbols).
set(exports "${CMAKE_CURRENT_LIST_DIR}/python_module.map")
target_link_options(_core PRIVATE "-Wl,--version-script=${exports}")
set_property(TARGET _core APPEND PROPERTY LINK_DEPENDS "${exports}")
install(TARGETS _core LIBRARY DESTINATION cortado)
# With -DCORTADO_BUILD_CUDA=ON and nvcc: apart from _core, which finds it here.
if(TARGET cortado_cuda_module)
  install(TARGETS cortado_cuda_module LIBRARY DESTINATION cortado)
endif()
if(TARGET cortado_cuda_kfac_module)
  install(TARGETS cortado_cuda_kfac_module LIBRARY DESTINATION cortado)
endif()
