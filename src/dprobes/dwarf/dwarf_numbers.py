"""Numbers of DWARF that dprobes uses, by the names of the standard (DWARF 5, chapter 7; extensions of GNU and dwz)."""

from __future__ import annotations

from typing import Final

__all__ = ["At", "Encoding", "Form", "Tag", "UnitKind"]


class Tag:
    """Tags of debugging information entries (DW_TAG_*)."""

    ARRAY_TYPE: Final = 0x01
    CLASS_TYPE: Final = 0x02
    ENUMERATION_TYPE: Final = 0x04
    FORMAL_PARAMETER: Final = 0x05
    LEXICAL_BLOCK: Final = 0x0B
    MEMBER: Final = 0x0D
    POINTER_TYPE: Final = 0x0F
    REFERENCE_TYPE: Final = 0x10
    STRUCTURE_TYPE: Final = 0x13
    TYPEDEF: Final = 0x16
    UNION_TYPE: Final = 0x17
    UNSPECIFIED_PARAMETERS: Final = 0x18
    INHERITANCE: Final = 0x1C
    INLINED_SUBROUTINE: Final = 0x1D
    MODULE: Final = 0x1E
    PTR_TO_MEMBER_TYPE: Final = 0x1F
    SUBRANGE_TYPE: Final = 0x21
    BASE_TYPE: Final = 0x24
    CONST_TYPE: Final = 0x26
    ENUMERATOR: Final = 0x28
    SUBPROGRAM: Final = 0x2E
    VARIABLE: Final = 0x34
    VOLATILE_TYPE: Final = 0x35
    RESTRICT_TYPE: Final = 0x37
    NAMESPACE: Final = 0x39
    IMPORTED_UNIT: Final = 0x3D
    RVALUE_REFERENCE_TYPE: Final = 0x42
    ATOMIC_TYPE: Final = 0x47
    IMMUTABLE_TYPE: Final = 0x4B


class At:
    """Attributes of debugging information entries (DW_AT_*)."""

    SIBLING: Final = 0x01
    LOCATION: Final = 0x02
    NAME: Final = 0x03
    BYTE_SIZE: Final = 0x0B
    BIT_OFFSET: Final = 0x0C
    BIT_SIZE: Final = 0x0D
    STMT_LIST: Final = 0x10
    LOW_PC: Final = 0x11
    HIGH_PC: Final = 0x12
    LANGUAGE: Final = 0x13
    COMP_DIR: Final = 0x1B
    IMPORT: Final = 0x18
    CONST_VALUE: Final = 0x1C
    LOWER_BOUND: Final = 0x22
    UPPER_BOUND: Final = 0x2F
    ABSTRACT_ORIGIN: Final = 0x31
    ARTIFICIAL: Final = 0x34
    CALLING_CONVENTION: Final = 0x36
    COUNT: Final = 0x37
    DATA_MEMBER_LOCATION: Final = 0x38
    DECL_FILE: Final = 0x3A
    DECL_LINE: Final = 0x3B
    DECLARATION: Final = 0x3C
    ENCODING: Final = 0x3E
    EXTERNAL: Final = 0x3F
    FRAME_BASE: Final = 0x40
    SPECIFICATION: Final = 0x47
    TYPE: Final = 0x49
    VARIABLE_PARAMETER: Final = 0x4B
    VIRTUALITY: Final = 0x4C
    ENTRY_PC: Final = 0x52
    RANGES: Final = 0x55
    SIGNATURE: Final = 0x69
    DATA_BIT_OFFSET: Final = 0x6B
    ENUM_CLASS: Final = 0x6D
    LINKAGE_NAME: Final = 0x6E
    STR_OFFSETS_BASE: Final = 0x72
    ADDR_BASE: Final = 0x73
    RNGLISTS_BASE: Final = 0x74
    DWO_NAME: Final = 0x76
    EXPORT_SYMBOLS: Final = 0x89
    LOCLISTS_BASE: Final = 0x8C
    MIPS_LINKAGE_NAME: Final = 0x2007
    GNU_DWO_NAME: Final = 0x2130
    GNU_DWO_ID: Final = 0x2131
    GNU_RANGES_BASE: Final = 0x2132
    GNU_ADDR_BASE: Final = 0x2133


class Form:
    """Encodings of attributes' values (DW_FORM_*)."""

    ADDR: Final = 0x01
    BLOCK2: Final = 0x03
    BLOCK4: Final = 0x04
    DATA2: Final = 0x05
    DATA4: Final = 0x06
    DATA8: Final = 0x07
    STRING: Final = 0x08
    BLOCK: Final = 0x09
    BLOCK1: Final = 0x0A
    DATA1: Final = 0x0B
    FLAG: Final = 0x0C
    SDATA: Final = 0x0D
    STRP: Final = 0x0E
    UDATA: Final = 0x0F
    REF_ADDR: Final = 0x10
    REF1: Final = 0x11
    REF2: Final = 0x12
    REF4: Final = 0x13
    REF8: Final = 0x14
    REF_UDATA: Final = 0x15
    INDIRECT: Final = 0x16
    SEC_OFFSET: Final = 0x17
    EXPRLOC: Final = 0x18
    FLAG_PRESENT: Final = 0x19
    STRX: Final = 0x1A
    ADDRX: Final = 0x1B
    REF_SUP4: Final = 0x1C
    STRP_SUP: Final = 0x1D
    DATA16: Final = 0x1E
    LINE_STRP: Final = 0x1F
    REF_SIG8: Final = 0x20
    IMPLICIT_CONST: Final = 0x21
    LOCLISTX: Final = 0x22
    RNGLISTX: Final = 0x23
    REF_SUP8: Final = 0x24
    STRX1: Final = 0x25
    STRX2: Final = 0x26
    STRX3: Final = 0x27
    STRX4: Final = 0x28
    ADDRX1: Final = 0x29
    ADDRX2: Final = 0x2A
    ADDRX3: Final = 0x2B
    ADDRX4: Final = 0x2C
    GNU_ADDR_INDEX: Final = 0x1F01
    GNU_STR_INDEX: Final = 0x1F02
    GNU_REF_ALT: Final = 0x1F20
    GNU_STRP_ALT: Final = 0x1F21


class UnitKind:
    """Kinds of units in the headers of DWARF 5 (DW_UT_*)."""

    COMPILE: Final = 1
    TYPE: Final = 2
    SKELETON: Final = 4
    SPLIT_COMPILE: Final = 5
    SPLIT_TYPE: Final = 6


class Encoding:
    """Encodings of base types (DW_ATE_*)."""

    ADDRESS: Final = 0x01
    BOOLEAN: Final = 0x02
    COMPLEX_FLOAT: Final = 0x03
    FLOAT: Final = 0x04
    SIGNED: Final = 0x05
    SIGNED_CHAR: Final = 0x06
    UNSIGNED: Final = 0x07
    UNSIGNED_CHAR: Final = 0x08
    UTF: Final = 0x10
