// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/saved_decision.h"

#include <charconv>
#include <system_error>

namespace cortado {

std::string SavedDecision::text() const {
  std::string text = "auto, step " + std::to_string(step) + (decided ? "" : ", measuring");
  for (const std::string& setting : refused) text += ", not " + setting;
  return text + ": " + what;
}

std::optional<SavedDecision> SavedDecision::parse(std::string_view text) {
  const std::string_view start = "auto", step = ", step ", measuring = ", measuring", refusing = ", not ";
  const std::size_t colon = text.find(": ");
  if (colon == std::string_view::npos || !text.starts_with(start)) return std::nullopt;
  SavedDecision saved;
  saved.what = text.substr(colon + 2);
  std::string_view rest = text.substr(start.size(), colon - start.size());
  if (rest.starts_with(step)) {
    rest.remove_prefix(step.size());
    const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), saved.step);
    if (parsed.ec != std::errc() || saved.step < 0) return std::nullopt;
    rest.remove_prefix(static_cast<std::size_t>(parsed.ptr - rest.data()));
  }
  saved.decided = !rest.starts_with(measuring);
  if (!saved.decided) rest.remove_prefix(measuring.size());
  while (!rest.empty()) {
    if (!rest.starts_with(refusing)) return std::nullopt;
    rest.remove_prefix(refusing.size());
    const std::string_view setting = rest.substr(0, rest.find(refusing));
    saved.refused.emplace_back(setting);
    rest.remove_prefix(setting.size());
  }
  return saved;
}

}  // namespace cortado
