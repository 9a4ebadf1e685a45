# The communicators that need more than the library does: each a library of its own, where what it needs is found.
# src/collective/mpi_*.cc become cortado_mpi, src/collective/nccl_*.cc become cortado_nccl.

function(cortado_add_transport name)
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/collective/${name}_*.cc")
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  add_library(cortado_${name} STATIC ${sources})
  add_library(cortado::cortado_${name} ALIAS cortado_${name})
  cortado_target(cortado_${name})
  target_include_directories(cortado_${name} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(cortado_${name} PUBLIC cortado PRIVATE ${ARGN})
endfunction()

# ---- MPI

set(MPI_CXX_SKIP_MPICXX ON) # its C interface is all we use
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  message(STATUS "MPI ${MPI_CXX_VERSION}: building cortado_mpi")
  cortado_add_transport(mpi MPI::MPI_CXX)
else()
  message(STATUS "MPI: not found, cortado_mpi is left out")
endif()

# Runs PROGRAM with ARGN in `ranks` processes. Without MPI the test is there and says that it is skipped.
function(cortado_add_mpi_test name ranks program)
  if(NOT TARGET cortado_mpi)
    add_test(NAME ${name} COMMAND "${CMAKE_COMMAND}" -E echo "skipped: MPI is not installed")
    set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: MPI")
    return()
  endif()
  add_test(NAME ${name} COMMAND "${MPIEXEC_EXECUTABLE}" ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${program}> ${ARGN}
           WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  # More ranks than cores, as root in containers, without warnings of absent networks. Open MPI's words; others ignore
  # them.
  set_tests_properties(
    ${name}
    PROPERTIES TIMEOUT 120 PROCESSORS 2 ENVIRONMENT
               "OMPI_MCA_rmaps_base_oversubscribe=1;OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;\
OMPI_MCA_btl_base_warn_component_unused=0;OMPI_MCA_btl_vader_single_copy_mechanism=none;OMPI_MCA_mpi_yield_when_idle=1")
endfunction()

# ---- NCCL

# Installed, in NCCL_ROOT (of CMake or the environment), or in the checkout's .venv: the Python packages nvidia-nccl-cu12
# and -cu13 are such a folder, nvidia/nccl, with the library under its full name only.
file(GLOB nccl_of_python LIST_DIRECTORIES true "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/nccl")
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} ENV NCCL_ROOT PATHS ${nccl_of_python} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} ENV NCCL_ROOT PATHS ${nccl_of_python}
             PATH_SUFFIXES lib)
find_package(CUDAToolkit QUIET)
if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY AND CUDAToolkit_FOUND)
  message(STATUS "NCCL in ${NCCL_INCLUDE_DIR}: building cortado_nccl")
  # By a name, which the package file finds again (install.cmake), not by this machine's path.
  add_library(NCCL::nccl UNKNOWN IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES
                                                                                  "${NCCL_INCLUDE_DIR}")
  cortado_add_transport(nccl NCCL::nccl CUDA::cudart)
else()
  message(STATUS "NCCL: nccl.h, libnccl or the CUDA toolkit not found (NCCL_ROOT says where), cortado_nccl is left out")
endif()
