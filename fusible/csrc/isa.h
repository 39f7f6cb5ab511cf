// The loops are compiled once per instruction set, each time into a namespace of its own; see build.py and loops.h.
#pragma once

#ifndef FUSIBLE_ISA
#define FUSIBLE_ISA base
#endif
