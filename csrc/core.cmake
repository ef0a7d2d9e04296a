# The core: transports, engine and kernels. It knows nothing of torch; the Python module (CMakeLists.txt) and the tests of
# the core (tests/cpp) include this file.
find_package(Threads REQUIRED)

set(PACELINE_SANITIZE "" CACHE STRING "address,undefined or thread")

add_library(paceline_core STATIC
  ${CMAKE_CURRENT_LIST_DIR}/common/cores.cc
  ${CMAKE_CURRENT_LIST_DIR}/common/log.cc
  ${CMAKE_CURRENT_LIST_DIR}/common/sha256.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/collectives.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/connection.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/decisions.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/engine.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/group.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/introductions.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/mailbox.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/packets.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/poller.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/program.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/pulling.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/scratch.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/sending.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/sharing.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/spreading.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/spreads.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine/teams.cc
  ${CMAKE_CURRENT_LIST_DIR}/reduce/reduce.cc
  ${CMAKE_CURRENT_LIST_DIR}/reduce/reduce_portable.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/frame.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/handshake.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/huge_pages.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/authentication.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/events.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/multicast.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/packet.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/placement.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/receiver.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/sender.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/sockets.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/multicast/thread.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/pulls.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/rings.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/shm/shm.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/stream.cc
  ${CMAKE_CURRENT_LIST_DIR}/transport/tcp/tcp.cc
)
target_include_directories(paceline_core PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_compile_options(paceline_core PRIVATE -Wall -Wextra -Wpedantic -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(paceline_core PRIVATE -Wno-restrict)  # false alarms on std::string, GCC bug 105651
endif()
target_compile_features(paceline_core PUBLIC cxx_std_20)
target_link_libraries(paceline_core PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(paceline_core PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
# Plain loops, which want all of the optimiser; with sanitizers that takes minutes and shows nothing more.
if(PACELINE_SANITIZE)
  set(KERNEL_OPTIMISATION -O1)
else()
  set(KERNEL_OPTIMISATION -O3)
endif()
set(KERNELS ${CMAKE_CURRENT_LIST_DIR}/reduce/reduce)
set_source_files_properties(${KERNELS}_portable.cc PROPERTIES COMPILE_OPTIONS ${KERNEL_OPTIMISATION})

# The same kernels again for newer processors; reduce.cc chooses at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_sources(paceline_core PRIVATE ${KERNELS}_avx2.cc ${KERNELS}_avx512.cc)
  target_compile_definitions(paceline_core PRIVATE PACELINE_X86)
  set_source_files_properties(${KERNELS}_avx2.cc PROPERTIES
    COMPILE_OPTIONS "${KERNEL_OPTIMISATION};-mavx2;-mfma;-mf16c")
  set_source_files_properties(${KERNELS}_avx512.cc PROPERTIES COMPILE_OPTIONS
    "${KERNEL_OPTIMISATION};-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx2;-mf16c;-mprefer-vector-width=512")
endif()

if(PACELINE_SANITIZE)
  target_compile_options(paceline_core PUBLIC
    -fsanitize=${PACELINE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(paceline_core PUBLIC -fsanitize=${PACELINE_SANITIZE})
endif()
