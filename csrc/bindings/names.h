// Names for the values of enumerations, by which Python knows them.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <string>

namespace openreg {

template <class E>
struct Named {
  E value;
  const char* name;
};

template <class E, std::size_t N>
const char* name_of(E value, const Named<E> (&all)[N]) {
  for (const auto& named : all)
    if (named.value == value) return named.name;
  TORCH_INTERNAL_ASSERT(false, "a value of an enumeration has no name");
}

template <class E, std::size_t N>
E value_of(const std::string& name, const Named<E> (&all)[N]) {
  for (const auto& named : all)
    if (name == named.name) return named.value;
  TORCH_CHECK_VALUE(false, "expected one of the names of an enumeration, but got \"", name, "\"");
}

} // namespace openreg
