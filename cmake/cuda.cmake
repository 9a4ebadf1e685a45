# cortado_cuda: the device variants of the codecs, where nvcc is found. Apart from the library, which stays free of CUDA.
#
#   src/**/*.cu, src/**/cuda_*.cc   library `cortado_cuda`, and libcortado_cuda.so, which Python loads
#   src/core/cuda_linalg.cc, cuda_products.cc, src/kfac/cuda_*.cc   library `cortado_cuda_kfac`, where cuSOLVER is found,
#                                   and libcortado_cuda_kfac.so, which Python loads
#   src/**/cuda_*_test.cc           programs `cortado_cuda_test`, `cortado_cuda_kfac_test`, which skip without a device
#   benchmarks/**/cuda_*.cc         one benchmark a file
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "CUDA: nvcc not found, cortado_cuda is left out and no .cu file is compiled")
  return()
endif()

# Two real architectures and, for later ones, the code they are made from. nvcc's flags take no generator expressions.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_DEBUG "-O3")
if(CORTADO_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}: building cortado_cuda for ${CMAKE_CUDA_ARCHITECTURES}")

# What every target with .cu files needs.
function(cortado_cuda_target target)
  target_compile_options(
    ${target}
    PRIVATE
      # Multiply and add stay two roundings, as on the CPU. Division, square root and denormals are IEEE's by default.
      $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>
      # std::bit_cast, std::min and std::array in kernels.
      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
  # Among nvcc's warnings: 20011 and 20014, a kernel calls what is there on the host only.
  if(CORTADO_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}")
endfunction()

file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*.cu")
file(GLOB_RECURSE cuda_host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*/cuda_*.cc")
list(FILTER cuda_host_sources EXCLUDE REGEX "_test\\.cc$")
set(cuda_kfac_sources ${cuda_host_sources})
list(FILTER cuda_kfac_sources INCLUDE REGEX "/(core/cuda_(linalg|products)|kfac/cuda_)[^/]*$")
list(REMOVE_ITEM cuda_host_sources ${cuda_kfac_sources})
# Plain C++, which sees CUDA's headers only: the options of all other sources.
add_library(cortado_cuda_host OBJECT ${cuda_host_sources})
cortado_target(cortado_cuda_host)
set_target_properties(cortado_cuda_host PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(cortado_cuda_host PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(cortado_cuda_host PRIVATE cortado CUDA::cudart_static)

add_library(cortado_cuda STATIC ${cuda_sources} $<TARGET_OBJECTS:cortado_cuda_host>)
add_library(cortado::cortado_cuda ALIAS cortado_cuda)
cortado_cuda_target(cortado_cuda)
# PERF: reading headers, three times a file, is most of nvcc's time; two files of all kernels take a third of it.
list(LENGTH cuda_sources count)
math(EXPR half "(${count} + 1) / 2")
set_target_properties(cortado_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${half})
target_link_libraries(cortado_cuda PUBLIC cortado PRIVATE CUDA::cudart_static)

# The same as a library to be loaded (cortado/device_library.h): Python finds it beside cortado._core.
add_library(cortado_cuda_module MODULE $<TARGET_OBJECTS:cortado_cuda_host>)
set_target_properties(cortado_cuda_module PROPERTIES OUTPUT_NAME cortado_cuda LINKER_LANGUAGE CXX)
target_link_libraries(cortado_cuda_module PRIVATE cortado_cuda cortado CUDA::cudart_static)
target_link_options(cortado_cuda_module PRIVATE -Wl,--exclude-libs,ALL)

# cuSOLVER, and the libraries it is linked with: the toolkit's, or those of NVIDIA's Python packages (nvidia-cusolver,
# -cublas, -cusparse and -nvjitlink) in the checkout's .venv or in the folder that CORTADO_CUDA_PACKAGES of the environment
# names, site-packages/nvidia/cu13. The packages have libraries under full names only.
file(GLOB cuda_of_python LIST_DIRECTORIES true "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13")
set(places ${CUDAToolkit_LIBRARY_DIR} ENV CORTADO_CUDA_PACKAGES PATHS ${cuda_of_python})
find_path(CUSOLVER_INCLUDE_DIR cusolverDn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${places} PATH_SUFFIXES include)
find_library(CUSOLVER_LIBRARY NAMES cusolver libcusolver.so.12 libcusolver.so.11 HINTS ${places} PATH_SUFFIXES lib)
find_library(CUBLAS_LIBRARY NAMES cublas libcublas.so.13 libcublas.so.12 HINTS ${places} PATH_SUFFIXES lib)
if(CUSOLVER_INCLUDE_DIR AND CUSOLVER_LIBRARY AND CUBLAS_LIBRARY)
  message(STATUS "cuSOLVER in ${CUSOLVER_INCLUDE_DIR}: building cortado_cuda_kfac")
  foreach(library cusolver cublas) # the toolkit's, or of that name; an installed cortado_cuda_kfac asks for the toolkit's
    string(TOUPPER "${library}" upper)
    if(NOT TARGET CUDA::${library})
      add_library(CUDA::${library} UNKNOWN IMPORTED)
      set_target_properties(CUDA::${library} PROPERTIES IMPORTED_LOCATION "${${upper}_LIBRARY}")
    endif()
  endforeach()
  set(cuda_kfac_libraries cortado_cuda CUDA::cusolver CUDA::cublas CUDA::cudart_static)
  set(cuda_kfac_library "${PROJECT_SOURCE_DIR}/src/kfac/cuda_kfac_library.cc")
  list(REMOVE_ITEM cuda_kfac_sources "${cuda_kfac_library}")
  add_library(cortado_cuda_kfac STATIC ${cuda_kfac_sources})
  add_library(cortado::cortado_cuda_kfac ALIAS cortado_cuda_kfac)
  # As a library to be loaded, too. Installed as a Python package it finds the libraries of NVIDIA's packages beside it.
  add_library(cortado_cuda_kfac_module MODULE "${cuda_kfac_library}")
  set_target_properties(cortado_cuda_kfac_module PROPERTIES OUTPUT_NAME cortado_cuda_kfac INSTALL_RPATH
                                                                                         "$ORIGIN/../nvidia/cu13/lib")
  target_link_options(cortado_cuda_kfac_module PRIVATE -Wl,--exclude-libs,ALL)
  target_link_libraries(cortado_cuda_kfac_module PRIVATE cortado_cuda_kfac)
  foreach(target cortado_cuda_kfac cortado_cuda_kfac_module)
    cortado_target(${target})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  endforeach()
  target_include_directories(cortado_cuda_kfac SYSTEM PRIVATE "${CUSOLVER_INCLUDE_DIR}")
  target_link_libraries(cortado_cuda_kfac PUBLIC cortado PRIVATE ${cuda_kfac_libraries})
else()
  message(STATUS "cuSOLVER: not found (CORTADO_CUDA_PACKAGES says where), cortado_cuda_kfac is left out")
endif()

add_custom_target(cuda) # all that needs CUDA, its tests and benchmarks included: tools/ci/cuda and tools/gpu_check build it
add_dependencies(cuda cortado_cuda cortado_cuda_module)
foreach(library cortado_nccl cortado_cuda_kfac cortado_cuda_kfac_module)
  if(TARGET ${library})
    add_dependencies(cuda ${library})
  endif()
endforeach()
