# `cmake --install`: headers, library, program, and a package file for find_package(cortado).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/cortado")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/cortado" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS cortado EXPORT cortado_targets)
install(EXPORT cortado_targets NAMESPACE cortado:: DESTINATION "${package_dir}")
if(TARGET cortado_cli)
  install(TARGETS cortado_cli)
endif()

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

# A program without MPI, NCCL or CUDA needs none of them to be there.
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
cortado_install_library_with(nccl "CUDAToolkit QUIET" CUDAToolkit_FOUND)
cortado_install_library_with(cuda "CUDAToolkit QUIET" CUDAToolkit_FOUND)
cortado_install_library_with(cuda_kfac "CUDAToolkit QUIET" CUDAToolkit_FOUND)

write_basic_package_version_file("${PROJECT_BINARY_DIR}/cortado-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/cortado-config.cmake" "${PROJECT_BINARY_DIR}/cortado-config-version.cmake"
        DESTINATION "${package_dir}")
