#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# man.sh KDA: a manual page from the help of the command.
cat <<'HEAD'
.TH KDA 1
.SH NAME
kda \- Kimi Delta Attention on safetensors files
.SH SYNOPSIS
.B kda
.I COMMAND
.SH DESCRIPTION
.nf
HEAD
"$1" --help | sed 's/\\/\\\\/g; s/-/\\-/g; s/^\./\\\&./'
echo '.fi'
