# `cmake --install`: headers, library, program, and a package file for find_package(cortado).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/cortado")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/cortado" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS cortado EXPORT cortado_targets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT cortado_targets NAMESPACE cortado:: DESTINATION "${package_dir}")
if(TARGET cortado_cli)
  install(TARGETS cortado_cli)
endif()
foreach(module cortado_cuda_module cortado_cuda_kfac_module) # what --device-library wants
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endforeach()

file(WRITE "${PROJECT_BINARY_DIR}/cortado-config.cmake"
     "include(CMakeFindDependencyMacro)\n"
     "find_dependency(Threads)\n"
     "find_dependency(hwy)\n"
     "find_dependency(ZLIB)\n"
     "set(cortado_bla_vendor \"\${BLA_VENDOR}\")\n"
     "set(BLA_VENDOR OpenBLAS)\n"
     "find_dependency(LAPACK)\n"
     "set(BLA_VENDOR \"\${cortado_bla_vendor}\")\n"
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/cortado_targets.cmake\")\n")

# A program without MPI, NCCL or CUDA needs none of them to be there. `found`: what has to be there, of the packages.
function(cortado_install_library_with name package found)
  if(TARGET cortado_${name})
    install(TARGETS cortado_${name} EXPORT cortado_${name}_targets)
    install(EXPORT cortado_${name}_targets NAMESPACE cortado:: DESTINATION "${package_dir}")
    file(APPEND "${PROJECT_BINARY_DIR}/cortado-config.cmake"
         "find_package(${package})\n"
         "if(${found})\n"
         "  include(\"\${CMAKE_CURRENT_LIST_DIR}/cortado_${name}_targets.cmake\")\n"
         "endif()\n")
  endif()
endfunction()
cortado_install_library_with(mpi "MPI QUIET COMPONENTS CXX" MPI_CXX_FOUND)
cortado_install_library_with(cuda "CUDAToolkit QUIET" CUDAToolkit_FOUND)
cortado_install_library_with(cuda_kfac "CUDAToolkit QUIET" "TARGET CUDA::cusolver AND TARGET CUDA::cublas")
if(TARGET cortado_nccl)
  file(APPEND "${PROJECT_BINARY_DIR}/cortado-config.cmake"
       "find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS \"\${NCCL_ROOT}\" ENV NCCL_ROOT PATH_SUFFIXES lib)\n"
       "if(NCCL_LIBRARY AND NOT TARGET NCCL::nccl)\n"
       "  add_library(NCCL::nccl UNKNOWN IMPORTED)\n"
       "  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION \"\${NCCL_LIBRARY}\")\n"
       "endif()\n")
endif()
cortado_install_library_with(nccl "CUDAToolkit QUIET" "CUDAToolkit_FOUND AND TARGET NCCL::nccl")

write_basic_package_version_file("${PROJECT_BINARY_DIR}/cortado-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/cortado-config.cmake" "${PROJECT_BINARY_DIR}/cortado-config-version.cmake"
        DESTINATION "${package_dir}")
