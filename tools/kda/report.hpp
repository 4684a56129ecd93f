// SPDX-License-Identifier: Apache-2.0
// What a command says when it is done.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kda::tools {

/// What --help says about every output file.
inline constexpr const char* kOutputHelp =
    R"(Output files: a new file gets the mode that the umask gives. An existing file is replaced at once
when the new data are on disk, and it keeps its mode. A symbolic link is followed. A failure or an
interruption leaves the old file as it was and no other file. Devices (/dev/null) and pipes are
written through, never replaced. - is the standard output; the report then goes to the standard
error.)";

/// Indented, with a newline. Bytes that are no UTF-8 (of paths) become U+FFFD.
std::string json_text(const nlohmann::ordered_json& report);

/// The words of a command line with spaces between them, those that a shell would split in quotes.
/// A program is named without the folders of this machine.
std::string command_text(int argc, const char* const* argv);

/// What every result on a CPU says of itself: {"date", "cpu", "command"}; the date is UTC's.
nlohmann::ordered_json provenance(const std::string& command);

/// The processor's name, or "unknown".
std::string cpu_model();

/// Writes to the standard output, or to the standard error if an output file is the former. Throws
/// kda::Error if that fails.
void print_report(const std::string& text, bool to_stderr = false);

/// The text with control characters as \xNN: a message is one line whatever came.
std::string one_line(const std::string& text);

}  // namespace kda::tools
