"""`shards` at a URL: the tars are listed on the server, their indexes are kept, and images are read through the cache."""

import contextlib
import hashlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

from configs.schema import Config
from datasets.index import ENDING, FileStamp, caches_folder
from datasets.shuffle import GroupedShuffle
from datasets.sources.remote.address import parse_address
from datasets.sources.remote.limits import choose_limit, free_bytes, spanned_bytes
from datasets.sources.remote.prefetch import MOST_AHEAD, Prefetcher
from datasets.sources.remote.server import Listed, Server
from datasets.sources.remote.tar_cache import DATE_NS, VERSION_DIGITS, RemoteTar, TarCache
from datasets.sources.remote.trouble import DeniedError, NotThereError
from datasets.sources.root import TRAIN_NAMES, VAL_NAMES, choose_parts
from datasets.sources.shards.folder import ShardFolder, part_of
from datasets.sources.shards.index import Shard, checksum, index_path, read_index, save_index, scan
from datasets.sources.shards.source import CLASSES_FILE, ShardImages, read_from
from datasets.sources.shards.source import read_shards as read_from_disk
from datasets.sources.shards.tar import Tar
from datasets.types import ImageSet
from utils.errors import ConfigError, DataError, cause_of
from utils.files import replacing
from utils.text import format_bytes, is_url

NUM_REQUESTS = 32  # at once, for sizes and indexes
NUM_SCANS = 4  # tars that are pulled at once for their index


def read_shards(config: Config, say: Callable[[str], None]) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation shards, or all shards and None; from a server if DATA.DATA_PATH is a URL."""
    if not is_url(config.DATA.DATA_PATH):
        return read_from_disk(config)
    folder = ServerFolder(config, say)
    try:
        train, val = read_from(folder, config)
    except DataError as error:
        raise DataError(folder.shown(str(error))) from None
    except OSError as error:
        raise DataError(
            f"DATA.CACHE_PATH: the cache of {folder.server.url} in {folder.cache.folder} cannot be used ({cause_of(error)}); "
            "set it to a writable folder with room"
        ) from error
    folder.check_limit(train if train is not None else val)
    return train, val


class ServerFolder(ShardFolder):
    """A folder on a server. Its tars have paths in the cache, whether they are there at the moment or not."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        data = config.DATA
        address = parse_address(data.DATA_PATH)
        self.server = Server(address.folder, data.REMOTE_PATIENCE, say)
        self._names, self._limit_gb, self._say = address.names, data.REMOTE_CACHE_GB, say
        known_by = hashlib.sha256(address.folder.encode()).hexdigest()[:16]
        self.cache = TarCache(caches_folder(config) / f"shards-{known_by}", self.server)
        super().__init__(self.cache.tars_folder)
        self._tars: dict[Path, RemoteTar] = {}
        self._listed: set[str] = set()
        self._scans = threading.Semaphore(NUM_SCANS)
        self._unsaid = [
            f"index: {self.server.url} has tars without a valid index beside them; each is read once to make it"
        ]
        self._orders: dict[tuple[int, int], GroupedShuffle] = {}
        self._prefetcher: Prefetcher | None = None
        self._aim: tuple[int, int, int] | None = None

    def __getstate__(self) -> dict:
        """For a loader process, without what belongs to this one."""
        return self.__dict__ | {"_say": None, "_scans": None, "_prefetcher": None}

    # --- what is on the server ---

    def find_tars(self) -> dict[str, list[Path]]:
        listed = self._list() if self._names is None else [Listed(name, False) for name in self._names]
        with ThreadPoolExecutor(NUM_REQUESTS, "server") as pool:
            files = list(pool.map(self._complete, sorted(listed)))
        found = defaultdict(list)
        for file in files:
            version = hashlib.sha256(f"{file.size} {file.version}".encode()).hexdigest()[:VERSION_DIGITS]
            tar = RemoteTar(file.name, file.size, version)
            path = self.cache.path(tar)
            self._tars[path] = tar
            found[part_of(PurePosixPath(file.name))].append(path)
        if self._names and not {name.lower() for name in found} & {*TRAIN_NAMES, *VAL_NAMES}:
            found = {TRAIN_NAMES[0]: list(self._tars)}  # they were named one by one, whatever they are called
        self._copy_classes()
        parts = choose_parts(found)
        self._make_room([self._tars[path] for name in (parts.train, parts.val) if name for path in found[name]])
        return found

    def _make_room(self, tars: list[RemoteTar]) -> None:
        self.cache.remove_left()
        self.cache.limit = choose_limit(self._limit_gb, sum(tar.size for tar in tars), self.cache)
        free, missing = free_bytes(self.cache.folder), sum(tar.size for tar in tars if not self.cache.holds(tar))
        self.notes = [
            f"{self.server.url}: {self.cache.describe(tars)}, which may hold {format_bytes(self.cache.limit)}; free there: "
            f"{format_bytes(free)}"
        ]
        if min(missing, self.cache.limit - self.cache.size()) > free:
            self.notes.append(
                "warning: the disk has less room than DATA.REMOTE_CACHE_GB allows; lower it, or make room"
            )

    def _list(self) -> list[Listed]:
        """The tars of the folder, and of the folders in it that are named like a part."""
        try:
            here = self.server.listing()
            below = [each.name for each in here if each.is_folder and each.name.lower() in (*TRAIN_NAMES, *VAL_NAMES)]
            more = [each._replace(name=f"{name}/{each.name}") for name in below for each in self.server.listing(name)]
        except (NotThereError, DeniedError) as error:
            if self.server.scheme == "s3":
                raise
            raise DataError(
                f"{error}. Servers that list no folders need the names: -data_path "
                f"'{self.server.url}/{{train-{{000000..000146}},val-{{000000..000006}}}}.tar'"
            ) from None
        self._listed = {each.name for each in (*here, *more)}
        return [each for each in (*here, *more) if not each.is_folder and each.name.lower().endswith(".tar")]

    def _complete(self, file: Listed) -> Listed:
        return file if file.size is not None else self.server.describe(file.name)

    def _copy_classes(self) -> None:
        content, copy = self.server.read(CLASSES_FILE), self.root / CLASSES_FILE
        self.root.mkdir(parents=True, exist_ok=True)
        if content is None:
            if copy.is_file():  # else the folder may be read-only
                copy.unlink()
        elif not copy.is_file() or copy.read_bytes() != content:
            with replacing(copy, shared=True) as file:
                file.write(content)

    # --- the index ---

    def size_and_date(self, path: Path) -> tuple[int, int]:
        """The date is always the same, as the names of paths hold the version."""
        return self._tars[path].size, DATE_NS

    def load(self, path: Path) -> tuple[Shard, bool]:
        """From an index in the cache, or on the server; else the whole tar is read to make one."""
        found = read_index(path, self._tars[path].size) or self._copy_index(path)
        if found is None:
            with self._scans:
                return self._scan(path), True
        return replace(found, mtime_ns=DATE_NS), True

    def _copy_index(self, path: Path) -> Shard | None:
        tar = self._tars[path]
        name = index_path(Path(tar.name)).as_posix()
        content = self.server.read(name) if self._names or name in self._listed else None
        if content is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(index_path(path), shared=True) as file:
            file.write(content)
        return read_index(path, tar.size)

    def _scan(self, path: Path) -> Shard:
        with contextlib.suppress(IndexError):  # said once, whichever thread comes here first
            self._say(self._unsaid.pop())
        while True:
            self.cache.pull(self._tars[path])
            with contextlib.suppress(FileNotFoundError):  # dropped for another
                shard = scan(path)
                save_index(shard)
                return shard

    # --- reading ---

    def open(self, tar: FileStamp) -> Tar:
        wanted = self._tars[tar.path]
        if not self.cache.holds(wanted) and wanted not in self.prefetcher.ahead:
            self._prefetch_after(wanted)
        while True:
            self._pull(wanted)
            with contextlib.suppress(FileNotFoundError):  # dropped for another
                opened = Tar(tar.path)
                self.cache.use(wanted)
                return opened

    def _prefetch_after(self, tar: RemoteTar) -> None:
        """Pull the tars after this one: evaluation and -check read in the order of the names."""
        part = part_of(PurePosixPath(tar.name))
        following = [each for each in self._tars.values() if each.name >= tar.name]
        self.prefetcher.aim([each for each in following if part_of(PurePosixPath(each.name)) == part][:MOST_AHEAD])
        self._aim = None

    def will_read(self, images: ImageSet, seed: int, epoch: int, position: int) -> None:
        """Pull the tars from this position on, and the first of the next epoch, each time that another one is begun."""
        order = self._order_of(images, seed, epoch)
        aim = (seed, epoch, order.groups_of(position, position + 1)[0])
        if aim != self._aim:
            self._aim = aim
            groups = order.groups_of(position, len(order))[:MOST_AHEAD].tolist()
            groups += self._order_of(images, seed, epoch + 1).groups[: MOST_AHEAD - len(groups)].tolist()
            self.prefetcher.aim([self._tars[images.tar(group).path] for group in groups])

    def _order_of(self, images: ShardImages, seed: int, epoch: int) -> GroupedShuffle:
        if (seed, epoch) not in self._orders:
            self._orders = {key: self._orders[key] for key in list(self._orders)[-1:]}  # two at most
            self._orders[seed, epoch] = images.epoch_order(seed, epoch)
        return self._orders[seed, epoch]

    @property
    def prefetcher(self) -> Prefetcher:
        """That of this process: threads do not survive a fork."""
        if self._prefetcher is None or self._prefetcher.pid != os.getpid():
            self._prefetcher = Prefetcher(self.cache, self._pull)
        return self._prefetcher

    def _pull(self, tar: RemoteTar, keep: Collection[Path] = (), waits: bool = True) -> bool:
        return self.cache.pull(tar, lambda part: self._check(tar, part), keep, waits)

    def _check(self, tar: RemoteTar, part: Path) -> None:
        path = self.cache.path(tar)
        index, known_in = read_index(path, tar.size), index_path(path)
        if known_in.is_file() and (index is None or index.checksum and checksum(Tar(part)) != index.checksum):
            # The next start asks the server for its index again. Until then an empty one keeps others from the tar.
            for table in self.root.glob(f"*{ENDING}"):
                table.unlink(missing_ok=True)
            known_in.write_bytes(b"")
            raise DataError(
                f"{self.server.url_of(tar.name)} is not the tar that its index describes; make its index anew on the server "
                f"(remove {index_path(Path(tar.name))}, or run make_shards.py again), and start again with -resume to continue"
            )

    def check_limit(self, images: ShardImages) -> None:
        """ConfigError if the cache cannot hold the tars between which images are shuffled."""
        needed = spanned_bytes(images)
        if needed > self.cache.limit:
            raise ConfigError(
                f"DATA.REMOTE_CACHE_GB: the cache in {self.cache.folder} may hold {format_bytes(self.cache.limit)}, but "
                f"DATA.SHUFFLE_BUFFER ({images.shuffle_buffer:,}) mixes the images of tars of {format_bytes(needed)}; raise "
                "the one, lower the other, or set DATA.CACHE_PATH to a disk with more room"
            )

    def shown(self, text: str) -> str:
        return re.sub(rf"\.[0-9a-f]{{{VERSION_DIGITS}}}(?=\.tar)", "", text.replace(str(self.root), self.server.url))
