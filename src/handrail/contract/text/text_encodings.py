"""The text of a file in its own encoding: found from its bytes, decoded, and encoded again without other changes.

The encoding is, in this order: that of a byte order mark, UTF-8, UTF-16 or UTF-32 without a mark, the encoding that the
file itself names (``coding:``, ``encoding="…"``, ``charset=…``), or the most plausible one of :data:`_LEGACY`. An
encoding counts only if it decodes the whole file and returns the same bytes. A file that fits none keeps its bytes as
well: each byte that is not UTF-8 is a surrogate in its text.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter

from handrail.contract.errors import ToolError, decode_text
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily

UTF_8_MARK = b"\xef\xbb\xbf"
_SAMPLE_BYTES = 4 * 1024
"""The bytes of a file from which its legacy encoding is guessed."""
_SAMPLE_CHARACTERS = 4_000
_PIECE = 256 * 1024
"""The bytes or characters that one native call processes. It blocks the interpreter meanwhile, in any thread."""


class TextEncoding(Struct, frozen=True):
    """An encoding of a file, with its byte order mark if the file has one.

    :param name: as the program ``iconv`` knows it
    :param codec: Python's name
    """

    name: str
    codec: str
    mark: bytes = b""

    @property
    def label(self) -> str:
        """The name for a result, with the mark."""
        return f"{self.name} with a byte order mark" if self.mark else self.name

    @property
    def is_utf8(self) -> bool:
        """Whether the bytes are UTF-8, perhaps after a mark."""
        return self.codec == "utf-8"

    def encode(self, text: str) -> bytes:
        """Return the bytes of ``text``.

        :raises ToolError: ``invalid_input`` for a character that this encoding does not have
        """
        if self.is_utf8:
            return self.mark + text.encode("utf-8", "surrogateescape")
        encoder = codecs.getincrementalencoder(self.codec)()
        parts = [self.mark]
        try:
            for at in range(0, len(text), _PIECE):
                parts.append(encoder.encode(text[at : at + _PIECE]))
            parts.append(encoder.encode("", final=True))
        except UnicodeEncodeError as error:
            raise _missing_character_error(self, error.object[error.start]) from None
        return b"".join(parts)


UTF_8 = TextEncoding("UTF-8", "utf-8")
MARKED_ENCODINGS = (
    TextEncoding("UTF-8", "utf-8", UTF_8_MARK),
    TextEncoding("UTF-32LE", "utf-32-le", codecs.BOM_UTF32_LE),
    TextEncoding("UTF-32BE", "utf-32-be", codecs.BOM_UTF32_BE),
    TextEncoding("UTF-16LE", "utf-16-le", codecs.BOM_UTF16_LE),
    TextEncoding("UTF-16BE", "utf-16-be", codecs.BOM_UTF16_BE),
)
_WIDE = (
    TextEncoding("UTF-32LE", "utf-32-le"),
    TextEncoding("UTF-32BE", "utf-32-be"),
    TextEncoding("UTF-16LE", "utf-16-le"),
    TextEncoding("UTF-16BE", "utf-16-be"),
)
_ISO_2022_JP = TextEncoding("ISO-2022-JP", "iso2022_jp")
_LATIN_1 = TextEncoding("ISO-8859-1", "latin-1")
_WINDOWS_1252 = TextEncoding("WINDOWS-1252", "cp1252")


class _LegacyEncoding(Struct, frozen=True):
    """An encoding from before Unicode, with the characters that texts in it consist of.

    :param common: the most common characters beyond ASCII, of an alphabet by their frequency; empty for the Latin alphabet
    :param letters: the range of further plausible characters, as a regular expression
    :param case: whether the script has upper and lower case, and its words have no other letters
    """

    encoding: TextEncoding
    common: str
    letters: re.Pattern[str]
    case: bool = False


def _legacy(name: str, codec: str, common: str, letters: str, *, case: bool = False) -> _LegacyEncoding:
    return _LegacyEncoding(TextEncoding(name, codec), common, compile_regex_lazily(f"[{letters}]"), case)


_LATIN_LETTERS = (
    "éàèêçâôîû ùïëœüæ",  # French
    "äöüß é",  # German
    "áéíóúñ¿¡ ü",  # Spanish
    "ãáçéíóâêú õàôü",  # Portuguese, in which õ is rare
    "àèéìòù î",  # Italian
    "åäö é",  # Swedish, Finnish
    "æøå éö",  # Danish, Norwegian
    "ëïéö áóèü",  # Dutch
    "àçéèíïòóúü ·",  # Catalan
    "áéíóúæö ðýþ",  # Icelandic
    "ąćęłńóśźż ",  # Polish
    "áčéěířšůýž ďňóťú",  # Czech
    "áčéíšťúýžľ äďĺňóôŕ",  # Slovak
    "áéíóöőúüű ",  # Hungarian
    "čćđšž ",  # Croatian, Slovenian
    "ăâîșțşţ ",  # Romanian
    "çğıöşüİ âî",  # Turkish
)
"""The letters of languages in the Latin alphabet: the frequent ones, and after a blank the rare ones."""
_FREQUENT_LETTERS = tuple(frozenset(letters.partition(" ")[0]) for letters in _LATIN_LETTERS)
_RARE_LETTERS = tuple(frozenset(letters.partition(" ")[2]) for letters in _LATIN_LETTERS)
_SIGNS = frozenset("«»„“”‘’–—…€°§•™£²\xa0")
"""Signs that texts in all these languages have."""
_KANA = (
    "".join(map(chr, range(0x3041, 0x3094))) + "".join(map(chr, range(0x30A1, 0x30F7))) + "、。「」・ー（）『』！？："
)
_KANJI = (
    "日一国人年大十二本中長出三時行見月分後前生五間上東四今金九入学高円子外八六下来気小七山話女北午百書先名川千"
    "水半男西電校語土木聞食車何南万毎白天母火右読友左休父雨会同事自社発者地業方新場員立開手力問代明動京目通言理"
    "体田主題意不作用度強公持野以思家世多正安院心界教文元重近考画海売知道集別物使品計死特私始朝運終台広住無真有"
    "口少町料工建空急止送切転研足究楽起着店病質待試族銀早映親験英医仕去味写字答夜音注帰古歌買悪図室歩風紙黒花春"
    "設定処理期化値型列数字変更保存削除追加実表示読込選択検索接続情報認証確入力出力成功失敗参照範囲最初要求"
)
_HANS = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所"
    "然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与"
    "长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己"
    "制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系"
    "气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社"
    "便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉"
    "格望觉术领共确传师观清今切院让识候带导争运，。、：；！？（）“”《》【】配置文件测试参数错误输入输出默认编码检查"
    "码返类值编写读键请注释称添删除修改查询界面户登录密网络服务器界试例单词简明语言错误"
)
_HANT = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡用道行所"
    "然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因只從想實日軍者意無力它與"
    "長把機十民第公此已工使情明性知全三又關點正業外將兩高間由問很最重並物手應戰向頭文體政美相見被利什二等產或新己"
    "制身果加西斯月話合回特代內信表化老給世位次度門任常先海通教兒原東聲提立及比員解水名真論處走義各入幾口認條平系"
    "氣題活爾更別打女變四神總何電數安少報才結反受目太量再感建務做接必場件計管期市直德資命山金指，。、：；！？（）「」"
    "『』設定檔案測試參數錯誤輸出預編碼檢查返類值寫讀鍵請註釋稱添刪除修詢介戶登錄密網路服器例單簡言"
)
_HANGUL = (
    "이다는의에을를가하고한지도사로인서기자은대어시그일리아정나수해보들만전부제라있으과와여면세관상모신오성장원여조경"
    "스유주무구적거되동안않때요니것공생선우트용비말생방었없연소게내음후치진개명화위국미단문계중분당불입간러람식재발마"
    "바행양할산더력속물권역결현까실직각회체터운업했법월년반영남북새민표같두하녕십입니습파테설값름시험읽쓰프그램메지코"
    "드변함열짜날호출력삭추출버데목록처류키태검색본디워크번찾확래저최초파버른른필요못참려준타포따점질차청많형강론외접활"
)
_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"

_LEGACY = (
    _legacy("ISO-8859-1", "latin-1", "", "À-ÖØ-öø-þ"),
    _legacy("WINDOWS-1252", "cp1252", "", "À-ÖØ-öø-þŠšŽž"),
    _legacy("SHIFT_JIS", "cp932", _KANA + _KANJI, "\u2460-\u2473\u4e00-\u9fff\u3000-\u303f\uff00-\uff9f"),
    _legacy("EUC-JP", "euc_jp", _KANA + _KANJI, "\u4e00-\u9fff\u3000-\u303f\uff00-\uff5e"),
    _legacy("GB18030", "gb18030", _HANS, "\u4e00-\u9fff\u3000-\u303f\uff00-\uff5e"),
    _legacy("BIG5", "cp950", _HANT, "\u4e00-\u9fff\u3000-\u303f\uff00-\uff5e"),
    _legacy("CP949", "cp949", _HANGUL, "\uac00-\ud7a3"),
    _legacy("WINDOWS-1251", "cp1251", _CYRILLIC, "А-яЁёІіЇїЄє«»–—№“”„…", case=True),
    _legacy("KOI8-R", "koi8-r", _CYRILLIC, "А-яЁё", case=True),
    _legacy("CP866", "cp866", _CYRILLIC, "А-яЁё№", case=True),
    _legacy("WINDOWS-1250", "cp1250", "", "À-ž"),
    _legacy("ISO-8859-2", "iso8859-2", "", "À-ž"),
    _legacy("ISO-8859-5", "iso8859-5", _CYRILLIC, "А-яЁё№", case=True),
    _legacy("WINDOWS-1254", "cp1254", "", "À-ž"),
    _legacy("MACINTOSH", "mac_roman", "", "À-ž"),
    _legacy("CP850", "cp850", "", "À-ž"),
    _legacy("CP852", "cp852", "", "À-ž"),
    _legacy("WINDOWS-1253", "cp1253", "αεηιονστάέίόκλμπρςυχύώήωγδθβφ", "Ά-ώ«»–—“”", case=True),
    _legacy("WINDOWS-1255", "cp1255", "יוהלאמרתבשנדעםחפקטגזצןסכךף", "\u05b0-\u05ea"),
    _legacy("WINDOWS-1256", "cp1256", "اليمنوهرتبعدسفةقكحجشأصطخ،ضىزثئذءغ", "\u0621-\u0652\u06a9-\u06cc؛؟"),
    _legacy("TIS-620", "tis-620", "าานรกอเงมยลวดทสตะปบคหแจพชขใไโ่้ิีึืุูั็์ำ", "\u0e01-\u0e5b"),
)
_ALIASES = {codecs.lookup(one.encoding.codec).name: one.encoding for one in _LEGACY} | {
    codecs.lookup(alias).name: encoding
    for encoding, aliases in (
        (_LEGACY[2].encoding, ("shift_jis", "ms932")),
        (_LEGACY[3].encoding, ("euc_jp",)),
        (_LEGACY[4].encoding, ("gb2312", "gbk")),
        (_LEGACY[5].encoding, ("big5",)),
        (_LEGACY[6].encoding, ("euc_kr",)),
        (_ISO_2022_JP, ("iso2022_jp",)),
    )
    for alias in aliases
}
"""Encodings that a file may name, by Python's name."""
_DECLARATION = compile_regex_lazily(
    rb"coding[:=][ \t]*\"?([-\w.]+)|<\?xml[^>]*encoding=[\"']([-\w.]+)|charset=[\"']?([-\w.]+)", re.IGNORECASE
)
_DECLARED_WITHIN = 1_024
_JAPANESE_ESCAPE = compile_regex_lazily(rb"\x1b\$[@B]")
_HIGH = compile_regex_lazily(rb"[\x80-\xff]")
_C1_BYTES = compile_regex_lazily(rb"[\x80-\x9f]")
_CONTROL = compile_regex_lazily(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_ODD = compile_regex_lazily(
    "[a-zß-öø-ÿ][À-ÖØ-ÞĂĄĆČĎĐĘĚĞİŁŃŇŐŒŘŚŞŠŤŮŰŸŹŻŽ]|\\w[¡-©«-±´¶-¹»-¿×÷‚„†‡ˆ‰‹›“”˜˘˙¨˝¸ˇ]\\w|(?:\\A|\\s)[©µ±]\\w"
    "|[a-zà-ž][²³][a-zà-ž]|[ß-öø-ÿ][A-Z]|[─-▟][A-Za-zß-ž]|[À-ÖØ-öø-þ]{3}"
)
"""Sequences that Western and Central European words do not have."""
_ODD_CASE = compile_regex_lazily("[а-яёα-ώ][А-ЯЁΑ-Ω]|[A-Za-z][а-яёА-ЯЁΑ-Ωα-ώ]|[а-яёА-ЯЁΑ-Ωα-ώ][A-Za-z]")
_PLAUSIBLE = 0.55
_SYLLABARY = 200
"""The fewest common characters of a script with several bytes each."""
_ALPHABET, _FREQUENT, _FEW_LETTERS = 45, 14, 3
"""The most letters of a script with one byte each, the number of its frequent ones, and how many letters tell nothing."""


class DecodedFileText(Struct, frozen=True):
    """The text of a file, with its encoding.

    :param data: the bytes, with the mark
    :param text: the text, without the mark
    """

    data: bytes
    text: str
    encoding: TextEncoding


def decode_file_text(data: bytes) -> DecodedFileText:
    """Return the text of a file. A file that is not text is read as UTF-8 with invalid bytes, which stay the same."""
    encoding = detect_text_encoding(data) or UTF_8
    body = data[len(encoding.mark) :] if encoding.mark else data
    if encoding.is_utf8:
        return DecodedFileText(data, decode_text(body, "surrogateescape"), encoding)
    return DecodedFileText(data, _decode_in_pieces(body, encoding.codec), encoding)


def replace_invalid_bytes(text: str) -> str:
    """Replace each byte of ``text`` that is not UTF-8 by U+FFFD, for display and JSON."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def convert_to_plain_utf8(data: bytes) -> tuple[bytes, TextEncoding | None]:
    r"""Return the text of a whole file in UTF-8, without a mark, and its encoding. Other bytes stay the same.

    A text whose lines end in ``\r`` only gets ``\n`` instead.
    """
    if (encoding := detect_text_encoding(data)) is None:
        return data, None
    if encoding.is_utf8:
        body = data[len(encoding.mark) :] if encoding.mark else data
    else:
        body = _decode_in_pieces(data[len(encoding.mark) :], encoding.codec).encode("utf-8", "surrogatepass")
    return (body.replace(b"\r", b"\n") if b"\r" in body and b"\n" not in body else body), encoding


def strip_byte_order_mark(text: str, encoding: TextEncoding) -> str:
    """Return a text from a model without the byte order mark that the file has anyway."""
    if not encoding.mark:
        return text
    return text.removeprefix("\ufeff").removeprefix("⟦U+FEFF⟧")


def decode_settings_text(data: bytes) -> str:
    """Return the text of a settings file: UTF-8, or the encoding of its byte order mark.

    :raises UnicodeDecodeError: for other bytes
    """
    for encoding in MARKED_ENCODINGS:
        if data.startswith(encoding.mark):
            return data[len(encoding.mark) :].decode(encoding.codec)
    return data.decode("utf-8")


def detect_text_encoding(data: bytes, *, is_whole: bool = True) -> TextEncoding | None:
    """Return the encoding of a file; None if it is not text.

    :param is_whole: whether ``data`` is the whole file, else its beginning
    """
    if data.isascii() and b"\0" not in data and (b"\x1b" not in data or b"\x1b$" not in data):
        return UTF_8
    for encoding in MARKED_ENCODINGS:
        if data.startswith(encoding.mark):
            body = data[len(encoding.mark) :]
            if _decodes(body, encoding, is_whole) and (b"\0" not in body if encoding.is_utf8 else True):
                return encoding
    if b"\0" in data:
        return next((one for one in _WIDE if _is_wide_text(data, one, is_whole)), None)
    if _JAPANESE_ESCAPE.search(data) and data.isascii():
        return _ISO_2022_JP if _is_kept_by(data, _ISO_2022_JP, is_whole) else UTF_8
    if _decodes(data, UTF_8, is_whole):
        return UTF_8
    return _detect_legacy(data, is_whole)


def _detect_legacy(data: bytes, is_whole: bool) -> TextEncoding | None:
    sample = _cut_sample(data)
    lenient = sample.decode("utf-8", "surrogateescape")
    invalid = sum("\udc80" <= character <= "\udcff" for character in lenient)
    valid = sum(character > "\x7f" for character in lenient) - invalid
    if valid >= invalid:
        return UTF_8  # with a few invalid bytes
    if (declared := _find_declared(data)) is not None and _is_kept_by(data, declared, is_whole):
        return declared
    if len(_CONTROL.findall(sample)) * 100 > len(sample):
        return None
    scores = [(_score(sample, one), one.encoding) for one in _LEGACY]  # in a stable order, from Western to others
    best = sorted((score for score in scores if score[0] >= _PLAUSIBLE), key=lambda score: -score[0])
    for _, encoding in best:
        chosen = _WINDOWS_1252 if encoding is _LEGACY[0].encoding and _C1_BYTES.search(data) else encoding
        if chosen.codec == "cp1252" and not _C1_BYTES.search(data):
            chosen = _LATIN_1
        if _is_kept_by(data, chosen, is_whole):
            return chosen
    return UTF_8 if invalid * 10 <= 3 * len(lenient) else None


def _score(sample: bytes, legacy: _LegacyEncoding) -> float:
    """Return how plausible a text is in an encoding, from 0 to 1."""
    try:
        text = codecs.getincrementaldecoder(legacy.encoding.codec)().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    counts = Counter(character for character in text if character > "\x7f")
    total = counts.total()
    if not legacy.common and total:
        return (_count_latin_letters(counts, legacy) - sum(1 for _ in _ODD.finditer(text))) / total
    is_alphabet = len(legacy.common) <= _ALPHABET
    if not total or (is_alphabet and total < _FEW_LETTERS):
        return 0.0
    good = 0.0
    for character, count in counts.items():
        if (rank := legacy.common.find(character.lower() if legacy.case else character)) >= 0:
            is_frequent = rank < _FREQUENT or not is_alphabet
            good += count * (1 if is_frequent else 0.7) * (0.8 if legacy.case and character.isupper() else 1)
        elif legacy.letters.match(character):
            good += 0.4 * count
    if len(legacy.common) > _SYLLABARY and total > 1:  # few other texts consist of such characters by chance
        good *= 1.06
    odd = sum(1 for _ in (_ODD_CASE if legacy.case else _ODD).finditer(text))
    return (good - odd) / total


def _count_latin_letters(counts: Counter[str], legacy: _LegacyEncoding) -> float:
    """Return how many characters fit one language in the Latin alphabet. Letters of another language count less.

    Signs without a letter are evidence for a Western encoding only. In others a stray byte is a sign too: 0xFF is a
    no-break space of CP850.
    """
    folded = Counter[str]()
    for character, count in counts.items():
        folded[character if character == "İ" else character.lower()] += count
    signs = sum(count for character, count in counts.items() if character in _SIGNS)
    letters = sum(count for character, count in counts.items() if legacy.letters.match(character))
    if not letters and legacy.encoding not in {_LATIN_1, _WINDOWS_1252}:
        return 0.0
    best = max(
        sum(count * (1 if one in frequent else 0.6 if one in rare else 0) for one, count in folded.items())
        - 0.4 * sum(count for one, count in folded.items() if one in frequent or one in rare)
        for frequent, rare in zip(_FREQUENT_LETTERS, _RARE_LETTERS, strict=True)
    )
    return signs + best + 0.4 * letters


def _cut_sample(data: bytes) -> bytes:
    """Return whole lines around the first bytes beyond ASCII."""
    first = _HIGH.search(data)
    start = data.rfind(b"\n", 0, first.start() if first else 0) + 1
    sample = data[start : start + _SAMPLE_BYTES]
    end = sample.rfind(b"\n") + 1
    return sample[:end] if end and _HIGH.search(sample, 0, end) else sample


def _find_declared(data: bytes) -> TextEncoding | None:
    if (found := _DECLARATION.search(data, 0, _DECLARED_WITHIN)) is None:
        return None
    name = (found[1] or found[2] or found[3]).decode("ascii", "replace")
    try:
        return _ALIASES.get(codecs.lookup(name).name)
    except LookupError:
        return None


def _decodes(data: bytes, encoding: TextEncoding, is_whole: bool) -> bool:
    decoder = codecs.getincrementaldecoder(encoding.codec)()
    try:
        for at in range(0, len(data), _PIECE):
            decoder.decode(data[at : at + _PIECE])
        decoder.decode(b"", final=is_whole)
    except UnicodeDecodeError:
        return False
    return True


def _is_kept_by(data: bytes, encoding: TextEncoding, is_whole: bool) -> bool:
    """Return whether ``data`` stays the same if it is decoded and encoded again."""
    if not is_whole:
        return _decodes(data, encoding, is_whole)
    try:
        return encoding.encode(_decode_in_pieces(data, encoding.codec)) == data
    except (UnicodeDecodeError, ToolError):
        return False


def _decode_in_pieces(data: bytes, codec: str) -> str:
    decoder = codecs.getincrementaldecoder(codec)()
    parts = [decoder.decode(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]
    return "".join((*parts, decoder.decode(b"", final=True)))


def _is_wide_text(data: bytes, encoding: TextEncoding, is_whole: bool) -> bool:
    """Return whether ``data`` is plausible in an encoding with several bytes for each character."""
    width = 4 if "32" in encoding.codec else 2
    if is_whole and len(data) % width:
        return False
    try:
        sample = codecs.getincrementaldecoder(encoding.codec)().decode(data[: _SAMPLE_CHARACTERS * width])
    except UnicodeDecodeError:
        return False
    if not sample or not all(map(_is_text_character, set(sample))):
        return False
    return _looks_like_one_script(sample) and _decodes(data, encoding, is_whole)


def _is_text_character(character: str) -> bool:
    return character in "\t\n\v\f\r\x1a\x1b\x85" or unicodedata.category(character) not in ("Cc", "Cn", "Co", "Cs")


def _looks_like_one_script(sample: str) -> bool:
    """Return whether most characters come from one block of 256 characters and the large scripts, and some from ASCII."""
    blocks = Counter(ord(character) >> 8 for character in sample)
    if blocks[0] < max(1, sum(not ord(character) & 0xFF for character in sample)):
        return False  # its zero bytes are not those of ASCII characters
    large = sum(count for block, count in blocks.items() if block in (0, 0x20, 0x30, 0xFF) or 0x4E <= block <= 0xD7)
    return large + max((n for block, n in blocks.items() if 0 < block < 0x20), default=0) >= 0.9 * len(sample)


def _missing_character_error(encoding: TextEncoding, character: str) -> ToolError:
    return ToolError(
        f"{encoding.name}, the encoding of the file, cannot represent the character {character!r} (U+{ord(character):04X}). "
        "Nothing was changed. Write the text without it, or first convert the file with a program, such as: iconv -f "
        f"{encoding.name} -t UTF-8.",
        kind="invalid_input",
    )
