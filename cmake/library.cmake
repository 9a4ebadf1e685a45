# The library. mpi_*, nccl_* and cuda_* need libraries that not every machine has and are left out of it, as is
# emulated_*, which tests need (cmake/tests.cmake).
file(GLOB_RECURSE sources RELATIVE "${PROJECT_SOURCE_DIR}" CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*.cc")
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
list(FILTER sources EXCLUDE REGEX "^src/cli/")
list(FILTER sources EXCLUDE REGEX "/(mpi|nccl|cuda|emulated)_[^/]*$")
if(CORTADO_SOURCES)
  list(JOIN CORTADO_SOURCES "|" wanted)
  list(FILTER sources INCLUDE REGEX "^src/(${wanted})(/|$)")
endif()
list(TRANSFORM sources PREPEND "${PROJECT_SOURCE_DIR}/")

# Files are read and written once a run, and most of the time to compile this goes into nlohmann-json: once for all, so
# names have to differ in all *_json.cc.
set(json_sources ${sources})
list(FILTER json_sources INCLUDE REGEX "_json\\.cc$")
list(FILTER sources EXCLUDE REGEX "_json\\.cc$")
add_library(cortado_json OBJECT ${json_sources})
cortado_target(cortado_json)
set_target_properties(cortado_json PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD ${CORTADO_UNITY} UNITY_BUILD_BATCH_SIZE 0)
target_include_directories(cortado_json PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(cortado_json PRIVATE nlohmann_json::nlohmann_json)
if(CORTADO_SANITIZE)
  target_compile_options(cortado_json PRIVATE -O0)
else()
  target_compile_options(cortado_json PRIVATE -O1)
endif()

# What a device library and who loads it must share (cortado/device_library.h).
file(GLOB headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/cortado/*.h")
list(APPEND headers "${PROJECT_SOURCE_DIR}/src/kfac/kfac_device.h" "${PROJECT_SOURCE_DIR}/src/kfac/inverter.h"
     "${PROJECT_SOURCE_DIR}/src/core/device.h" # the classes behind KfacDevice
     "${PROJECT_SOURCE_DIR}/src/collective/scheme_device.h" "${PROJECT_SOURCE_DIR}/src/codec/device_batch.h"
     "${PROJECT_SOURCE_DIR}/src/codec/device_layout.h" "${PROJECT_SOURCE_DIR}/src/codec/device_tensors.h"
     "${PROJECT_SOURCE_DIR}/src/codec/payload_moves.h" "${PROJECT_SOURCE_DIR}/src/collective/add_term.h"
     "${PROJECT_SOURCE_DIR}/src/core/device_queue.h") # and behind SchemeDevice
set(watched ${headers})
list(REMOVE_ITEM watched "${PROJECT_SOURCE_DIR}/include/cortado/version.h") # is watched; twice is an error of Ninja's
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${watched})
set(hashes "")
foreach(header IN LISTS headers)
  file(SHA256 "${header}" hash)
  string(APPEND hashes ${hash})
endforeach()
string(SHA256 hash "${hashes}")
set_source_files_properties(
  "${PROJECT_SOURCE_DIR}/src/session/device_library.cc" PROPERTIES COMPILE_DEFINITIONS "CORTADO_HEADERS_HASH=\"${hash}\"")

add_library(cortado STATIC ${sources})
add_library(cortado::cortado ALIAS cortado)
cortado_target(cortado)
if(CORTADO_BUILD_FUZZERS)
  target_compile_options(cortado_json PRIVATE -fsanitize=fuzzer-no-link)
  target_compile_options(cortado PRIVATE -fsanitize=fuzzer-no-link) # the coverage that fuzzers follow; tests do without
endif()
if(CORTADO_SANITIZE)
  cortado_precompile_headers(cortado)
endif()
cortado_unite(cortado "/src/codec/[^/]+/") # authors of codecs needn't know the names of others
target_sources(cortado PRIVATE $<TARGET_OBJECTS:cortado_json>)
set_target_properties(cortado PROPERTIES POSITION_INDEPENDENT_CODE ON LINKER_LANGUAGE CXX)
target_compile_features(cortado PUBLIC cxx_std_20)
target_include_directories(
  cortado
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(
  cortado
  PUBLIC Threads::Threads
  PRIVATE hwy::hwy ZLIB::ZLIB LAPACK::LAPACK ${CMAKE_DL_LIBS} $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
