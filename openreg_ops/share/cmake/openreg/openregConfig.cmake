# find_package(openreg) defines
#   openreg::headers  the headers alone: for a library that Python loads, which finds the device in its process
#   openreg::openreg  the headers and libopenreg_ops.so: for a standalone program
get_filename_component(_openreg "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET openreg::headers)
  add_library(openreg::headers INTERFACE IMPORTED)
  set_target_properties(openreg::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_openreg}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
  add_library(openreg::openreg SHARED IMPORTED)
  set_target_properties(openreg::openreg PROPERTIES
    INTERFACE_COMPILE_DEFINITIONS OPENREG_LINKED
    IMPORTED_LOCATION "${_openreg}/lib/libopenreg_ops.so"
    INTERFACE_LINK_LIBRARIES openreg::headers)
endif()
unset(_openreg)
